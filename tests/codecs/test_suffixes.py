"""Compressed members."""

from __future__ import annotations

import bz2
import gzip
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


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("field", "value"), [("json", [1]), ("a.json", [1]), ("txt", "[1]"), ("dat", b"[1]"), ("TXT", "[1]")]
)
def test_suffix_is_peeled_when_a_member_is_compressed(suffix: str, field: str, value: Any) -> None:
    """The rest of the name says the type; the field keeps its name."""
    assert decode(f"{field}.{suffix}", COMPRESS[suffix](b"[1]")) == value


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_gives_bytes_when_it_is_the_whole_field(suffix: str) -> None:
    """A field that is only a suffix becomes the decompressed bytes."""
    assert decode(suffix, COMPRESS[suffix](TEXT)) == TEXT


@pytest.mark.parametrize("field", ["gz", "txt.gz", "json.gz", "dat.gz", "a.cls.gz"])
def test_gzip_equals_webdataset_when_a_member_is_compressed(field: str) -> None:
    """Gzip fields of webdataset give the same values under the same names."""
    sample = {"__key__": "k", field: gzip.compress(b"12")}
    assert Decoder()(sample) == webdataset.autodecode.Decoder([])(sample)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_reads_on_when_several_streams_follow_one_another(suffix: str) -> None:
    """Concatenated streams are one content, empty ones among them."""
    compress = COMPRESS[suffix]
    assert decode(f"txt.{suffix}", compress(b"a") + compress(b"") + compress(TEXT)) == "a" + TEXT.decode()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_raises_when_cut_anywhere(suffix: str) -> None:
    """No cut passes for a shorter content."""
    data = COMPRESS[suffix](b"some text, short")
    for cut in range(len(data)):
        with pytest.raises(DecodingError, match=rf"compressed data \(\.{suffix}\)"):
            decode(f"txt.{suffix}", data[:cut])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_raises_when_a_checksum_is_wrong(suffix: str) -> None:
    """A damaged content fails its checksum."""
    data = bytearray(COMPRESS[suffix](TEXT))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DecodingError):
        decode(f"txt.{suffix}", bytes(data))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_raises_when_garbage_follows_or_it_is_not_compressed(suffix: str) -> None:
    """Bytes behind the stream, and plain bytes, are errors."""
    for data in (COMPRESS[suffix](TEXT) + b"garbage", b"plain text", b""):
        with pytest.raises(DecodingError, match="compressed data"):
            decode(f"txt.{suffix}", data)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_raises_when_the_limit_is_passed(suffix: str) -> None:
    """What decompresses to exactly `max_bytes` is read, one byte more is an error, in one stream or several."""
    compress = COMPRESS[suffix]
    assert decode(suffix, compress(TEXT), max_bytes=len(TEXT)) == TEXT
    for data in (compress(TEXT), compress(TEXT[:5]) + compress(TEXT[5:])):
        with pytest.raises(DecodingError, match="max_bytes"):
            decode(suffix, data, max_bytes=len(TEXT) - 1)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_stops_early_when_the_data_is_a_bomb(suffix: str) -> None:
    """A few kB that hold 20 MB are refused without unpacking them."""
    with pytest.raises(DecodingError, match="max_bytes"):
        decode(suffix, COMPRESS[suffix](bytes(20_000_000)), max_bytes=1000)


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


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_decoder_raises_when_max_bytes_is_too_small(max_bytes: int) -> None:
    """A limit below one byte is refused by the constructor."""
    with pytest.raises(ValueError, match="max_bytes"):
        Decoder(max_bytes=max_bytes)


@pytest.mark.parametrize("max_bytes", [None, 1.5, "1GB", True])
def test_decoder_raises_when_max_bytes_is_no_int(max_bytes: Any) -> None:
    """A limit of another type is a TypeError."""
    with pytest.raises(TypeError, match="max_bytes"):
        Decoder(max_bytes=max_bytes)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_reads_all_streams_when_they_have_every_size(suffix: str) -> None:
    """Streams end anywhere in the pieces that a decompressor gets."""
    sizes = random.Random(5)
    parts = [sizes.randbytes(sizes.choice((0, 1, 30, 700, 5000, 70_000))) for _ in range(40)]
    packed = b"".join(COMPRESS[suffix](part) for part in parts)
    assert decode(suffix, packed) == b"".join(parts)
    with pytest.raises(DecodingError, match="cut off"):
        decode(suffix, packed[:-1])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_suffix_copies_no_byte_often_when_streams_are_tiny(suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decompressor copies what it does not use: given all the rest, a thousand streams would take quadratic time."""
    handed = 0
    compression = suffixes.SUFFIXES[suffix]

    class Counted:
        def __init__(self, machine: Any) -> None:
            self.machine = machine

        def __getattr__(self, name: str) -> Any:
            return getattr(self.machine, name)

        def decompress(self, data: bytes, *limit: int) -> Any:
            nonlocal handed
            handed += len(data)
            return self.machine.decompress(data, *limit)

    def prepare() -> Callable[[], Any]:
        new = compression.prepare()
        return lambda: Counted(new())

    monkeypatch.setitem(suffixes.SUFFIXES, suffix, compression._replace(prepare=prepare))
    data = COMPRESS[suffix](b"x") * 1000
    assert decode(suffix, data) == b"x" * 1000
    assert handed <= 1000 * 512 + 2 * len(data)


def test_xz_field_raises_when_its_dictionary_is_huge() -> None:
    """A field of 100 bytes may ask for 1.5 GiB of memory."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 300 << 20}]
    with pytest.raises(DecodingError, match="Memory usage limit"):
        decode("xz", lzma.compress(b"x", filters=filters))
