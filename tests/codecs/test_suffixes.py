"""Compressed members."""

import bz2
import gzip
import itertools
import lzma
import random
from collections.abc import Callable
from typing import Any

import pytest
import webdataset.autodecode
import zstandard

from torchdata_wds.codecs import Decoder, handle_extension, suffixes
from torchdata_wds.errors import DecodingError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
SUFFIXES = list(COMPRESS)
TEXT = b"0123456789" * 300


def decode(field: str, data: bytes, *decoders: Any, **options: Any) -> Any:
    """The value of one field."""
    return Decoder(*decoders, **options)({"__key__": "k", field: data})[field]


def test_suffix_is_peeled_when_a_member_is_compressed() -> None:
    """The rest of the name says the type, and the field keeps its name; a field that is only a suffix becomes bytes."""
    for suffix, (field, value) in itertools.product(
        SUFFIXES, [("json", [1]), ("a.json", [1]), ("txt", "[1]"), ("dat", b"[1]"), ("TXT", "[1]")]
    ):
        assert decode(f"{field}.{suffix}", COMPRESS[suffix](b"[1]")) == value
    for suffix in SUFFIXES:
        assert decode(suffix, COMPRESS[suffix](TEXT)) == TEXT
    for field in ["gz", "txt.gz", "json.gz", "dat.gz", "a.cls.gz"]:
        sample = {"__key__": "k", field: gzip.compress(b"12")}
        assert Decoder()(sample) == webdataset.autodecode.Decoder([])(sample)


def test_suffix_reads_all_streams_when_several_follow_one_another() -> None:
    """Concatenated streams are one content, empty ones too, wherever they end in a decompressor's pieces."""
    for suffix in SUFFIXES:
        compress = COMPRESS[suffix]
        assert decode(f"txt.{suffix}", compress(b"a") + compress(b"") + compress(TEXT)) == "a" + TEXT.decode()
    for suffix in SUFFIXES:
        sizes = random.Random(5)
        parts = [sizes.randbytes(sizes.choice((0, 1, 30, 700, 5000, 70_000))) for _ in range(40)]
        packed = b"".join(COMPRESS[suffix](part) for part in parts)
        assert decode(suffix, packed) == b"".join(parts)
        with pytest.raises(DecodingError, match="cut off"):
            decode(suffix, packed[:-1])


def test_suffix_raises_when_cut_damaged_or_followed_by_garbage() -> None:
    """No cut passes for a shorter content, a damaged content fails its checksum, and plain bytes are an error."""
    for suffix in SUFFIXES:
        data = COMPRESS[suffix](b"some text, short")
        for cut in range(len(data)):
            with pytest.raises(DecodingError, match=rf"compressed data \(\.{suffix}\)"):
                decode(f"txt.{suffix}", data[:cut])
    for suffix in SUFFIXES:
        data = bytearray(COMPRESS[suffix](TEXT))
        data[len(data) // 2] ^= 0xFF
        with pytest.raises(DecodingError):
            decode(f"txt.{suffix}", bytes(data))
    for suffix in SUFFIXES:
        for data in (COMPRESS[suffix](TEXT) + b"garbage", b"plain text", b""):
            with pytest.raises(DecodingError, match="compressed data"):
                decode(f"txt.{suffix}", data)


def test_suffix_reads_zero_padding_when_it_is_not_zstd() -> None:
    """Tape tools fill up with zero bytes; zstd has frames of its own for that."""
    for suffix in ("gz", "bz2", "xz"):
        padded = COMPRESS[suffix](b"a") + bytes(600)
        assert decode(suffix, padded) == b"a"
        assert decode(suffix, padded + COMPRESS[suffix](b"b")) == b"ab"
    with pytest.raises(DecodingError, match="compressed data"):
        decode("zst", COMPRESS["zst"](b"a") + bytes(600))


def test_suffix_raises_when_the_limit_is_passed() -> None:
    """Exactly `max_bytes` are read, one byte more is an error; a bomb is refused without unpacking it."""
    for suffix in SUFFIXES:
        compress = COMPRESS[suffix]
        assert decode(suffix, compress(TEXT), max_bytes=len(TEXT)) == TEXT
        for data in (compress(TEXT), compress(TEXT[:5]) + compress(TEXT[5:])):
            with pytest.raises(DecodingError, match="max_bytes"):
                decode(suffix, data, max_bytes=len(TEXT) - 1)
    for suffix in SUFFIXES:
        with pytest.raises(DecodingError, match="max_bytes"):
            decode(suffix, COMPRESS[suffix](bytes(5_000_000)), max_bytes=1000)


def test_user_decoder_sees_the_decompressed_field_when_a_member_is_compressed() -> None:
    """A function gets the data and the name without the suffix; only an extension that names it gets the bytes."""
    seen = []

    def note(key: str, data: bytes) -> None:
        seen.append((key, data))

    packed = gzip.compress(b"[1]")
    assert decode("a.json.gz", packed, note) == [1]
    assert seen == [(".a.json", b"[1]")]
    seen.clear()
    assert decode("a.bin.gz.xz", lzma.compress(gzip.compress(b"x")), note) == b"x"
    assert seen == [(".a.bin", b"x")]
    assert decode("json.gz", packed, handle_extension("json", len)) == 3
    assert decode("json.gz", packed, handle_extension("json.gz", len)) == len(packed)
    assert decode("json.gz", packed, handle_extension("gz", len)) == len(packed)


def test_decoder_raises_when_max_bytes_is_wrong() -> None:
    """A limit is a whole number of at least one byte."""
    for max_bytes in [0, -1]:
        with pytest.raises(ValueError, match="max_bytes"):
            Decoder(max_bytes=max_bytes)
    for max_bytes in [None, 1.5, "1GB", True]:
        with pytest.raises(TypeError, match="max_bytes"):
            Decoder(max_bytes=max_bytes)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_copies_no_byte_often_when_streams_are_tiny(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decompressor copies what it does not use: given all the rest, a thousand streams would take quadratic time."""
    handed = 0
    magic, new = suffixes.SUFFIXES[suffix]

    class Counted:
        def __init__(self, machine: Any) -> None:
            self.machine = machine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.machine, name)

        def decompress(self, data: bytes, *limit: int) -> Any:
            nonlocal handed
            handed += len(data)
            return self.machine.decompress(data, *limit)

    monkeypatch.setitem(suffixes.SUFFIXES, suffix, (magic, lambda: Counted(new())))
    data = COMPRESS[suffix](b"x") * 1000
    assert decode(suffix, data) == b"x" * 1000
    assert handed <= 1000 * 512 + 2 * len(data)


def test_xz_field_raises_when_its_dictionary_is_huge() -> None:
    """A field of 100 bytes may ask for 1.5 GiB of memory."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 300 << 20}]
    with pytest.raises(DecodingError, match="Memory usage limit"):
        decode("xz", lzma.compress(b"x", filters=filters))
