"""Compression: found by its bytes, whole or an error, bounded in memory."""

import bz2
import gzip
import io
import lzma
import os
import random
import shutil
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zstandard

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.storage import open_shard, wrap_stream
from torchdata_wds.storage.byte_streams import ShardSource
from torchdata_wds.storage.compressed_input import CompressedInput

Pack = Callable[[bytes], bytes]

random.seed(3)
DATA = bytes(random.choices(b"abcdefgh", k=700)) + bytes(300) + random.randbytes(200)


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


PACKERS: dict[str, Pack] = {
    "gzip": gzip.compress,
    "gzip without isal": gzip.compress,
    "bzip2": partial(bz2.compress, compresslevel=1),
    "xz": lzma.compress,
    "zstd": zstd,
}


#: Those that take long; the quick ones go the same ways.
LONG = ("gzip without isal", "bzip2", "xz")


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.slow) if kind in LONG else kind for kind in PACKERS])
def pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pack:
    """Compresses in each format; gzip is read with isal (where it is installed) and without."""
    if request.param == "gzip without isal":
        monkeypatch.setitem(sys.modules, "isal", None)
    return PACKERS[request.param]


def unpack(packed: bytes, step: int = 512) -> tuple[bytes, Exception | None]:
    """What is read in steps until the end or an error, and the error."""
    got = b""
    with wrap_stream(io.BytesIO(packed), "x.tar") as stream:
        try:
            while piece := stream.read(step):
                got += piece
        except Exception as error:
            return got, error
    return got, None


def test_decoders_read_back_when_whole(pack: Pack) -> None:
    """What was compressed is read back, whatever the size, and compression is found without a name."""
    for data in (b"", b"a", DATA, DATA * 300, bytes(3_000_000)):
        assert unpack(pack(data), 100_000) == (data, None)


def test_decoders_read_all_parts_when_several_are_concatenated(pack: Pack) -> None:
    """Members, streams and frames that follow each other are one shard, empty ones too."""
    assert unpack(pack(DATA) + pack(b"") + pack(b"xyz") + pack(DATA)) == (DATA + b"xyz" + DATA, None)


def test_decoders_accept_zeros_when_they_pad_the_end(pack: Pack) -> None:
    """Zero bytes behind the end are padding, as for gzip(1)."""
    assert unpack(pack(DATA) + bytes(100_000)) == (DATA, None)


def test_decoders_raise_when_something_else_follows(pack: Pack) -> None:
    """Bytes behind the end are an error that shows them and their offset, after all data was delivered."""
    packed = pack(DATA)
    got, error = unpack(packed + b"garbage", 1)
    assert got == DATA
    assert isinstance(error, ShardFormatError)
    assert f"b'garb' at byte {len(packed):,}" in str(error)
    assert error.shard == "x.tar"


def test_decoders_raise_at_every_truncation_point(pack: Pack) -> None:
    """A cut anywhere is an error that says where; only an empty file is left to the reader."""
    packed = pack(DATA)
    for size in range(1, len(packed)):
        got, error = unpack(packed[:size], 1)
        assert isinstance(error, ShardFormatError), size
        assert "cut off" in str(error), size
        assert f"ends at byte {size:,}" in str(error), size
        assert DATA.startswith(got), size


def test_decoders_raise_at_every_truncation_point_when_read_from_a_file(pack: Pack, tmp_path: Path) -> None:
    """The way through a local file finds the same, down to a single byte."""
    packed = pack(DATA)
    path = tmp_path / "x"
    for size in (1, 2, 3, 5, 8, len(packed) // 2, len(packed) - 1):
        path.write_bytes(packed[:size])
        with open_shard(path) as stream, pytest.raises(ShardFormatError, match="cut off"):
            stream.read(1 << 20)


def test_decoders_raise_or_read_back_when_a_byte_is_damaged(pack: Pack) -> None:
    """Each damaged byte is an error or changes nothing; behind a damaged magic, the file is given as it is."""
    packed = pack(DATA)
    for position in range(len(packed)):
        for flip in (0xFF, 0x01):
            damaged = packed[:position] + bytes([packed[position] ^ flip]) + packed[position + 1 :]
            got, error = unpack(damaged)
            if error is None:
                assert got == DATA or (position < 10 and got == damaged), position
            else:
                assert isinstance(error, ShardFormatError), (position, error)


@pytest.mark.parametrize(
    ("packer", "checksum"),
    [(gzip.compress, -8), (gzip.compress, -4), (zstd, -4)],
    ids=["gzip crc", "gzip length", "zstd checksum"],
)
def test_decoders_deliver_all_data_before_the_error_when_a_checksum_is_wrong(packer: Pack, checksum: int) -> None:
    """A wrong checksum at the end is met after the last byte, for small shards and large ones."""
    for data in (DATA, DATA * 300):
        packed = bytearray(packer(data))
        packed[checksum] ^= 1
        with wrap_stream(io.BytesIO(bytes(packed)), "x.tar") as stream:
            assert stream.read(len(data)) == data
            with pytest.raises(ShardFormatError, match="damaged"):
                stream.read(512)


def test_decoders_deliver_what_comes_before_when_cut_in_the_middle(pack: Pack) -> None:
    """Most of the data before a cut is delivered before the error."""
    data = random.randbytes(1_000_000)
    packed = pack(data)
    got, error = unpack(packed[: len(packed) * 3 // 4])
    assert isinstance(error, ShardFormatError)
    assert data.startswith(got)
    assert len(got) > 50_000


@pytest.mark.parametrize("isal", [True, False], ids=["isal", "zlib"])
@pytest.mark.parametrize("size", [1_000, 65_536, 1_000_000])
def test_gzip_delivers_what_comes_before_when_a_block_is_damaged(
    size: int, isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a kind that does not exist costs no more than one step of the data before it."""
    if not isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    data = random.Random(1).randbytes(size)
    raw = zlib.compressobj(1, zlib.DEFLATED, -15)
    damaged = raw.compress(data) + raw.flush(zlib.Z_FULL_FLUSH) + b"\x07" * 50
    got, error = unpack(b"\x1f\x8b\x08" + bytes(7) + damaged)
    assert isinstance(error, ShardFormatError)
    assert "damaged" in str(error)
    assert data.startswith(got)
    assert len(got) > size - (64 << 10)


def test_gzip_reads_every_header_field() -> None:
    """Extra field, name, comment and header CRC are read past."""
    raw = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = raw.compress(DATA) + raw.flush() + struct.pack("<II", zlib.crc32(DATA), len(DATA))
    header = b"\x1f\x8b\x08\x1e" + bytes(6) + struct.pack("<H", 3) + b"abc" + b"name\0" + b"comment\0" + b"hh"
    assert unpack(header + body) == (DATA, None)
    for size in range(1, len(header)):
        assert isinstance(unpack(header[:size])[1], ShardFormatError)


def test_gzip_raises_when_a_header_name_never_ends() -> None:
    """A name of a megabyte is damage, not something to look through."""
    _, error = unpack(b"\x1f\x8b\x08\x08" + bytes(6) + b"a" * (1 << 20))
    assert "65,536 bytes in its header" in str(error)


def test_zstd_reads_frames_of_every_kind() -> None:
    """Frames without checksum or size, skippable frames, and frames of raw and repeated blocks are read."""
    plain = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compress(DATA)
    streamed = zstandard.ZstdCompressor(level=1).compressobj()
    blocks = streamed.compress(DATA * 500) + streamed.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    blocks += streamed.compress(bytes(1_000_000)) + streamed.flush()
    skippable = b"\x5a\x2a\x4d\x18" + struct.pack("<I", 9000) + bytes(9000)
    noise = random.randbytes(300_000)
    packed = skippable + plain + skippable + blocks + zstd(noise) + skippable
    assert unpack(packed) == (DATA + DATA * 500 + bytes(1_000_000) + noise, None)


def zstd_blocks(contents: list[bytes]) -> list[bytes]:
    """A frame of one block for each content, cut into blocks; its header is with the first one."""
    packer = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj()
    blocks = [packer.compress(data) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for data in contents]
    return [*blocks, packer.flush()]


def test_zstd_delivers_all_blocks_before_the_error_when_one_is_damaged() -> None:
    """Small blocks go to the decompressor together only where an error costs no output; the error says where it is."""
    texts = [b"%d " % number * 300 for number in range(9)]
    for contents in (texts, [random.randbytes(900) for _ in texts], [*texts[:4], random.randbytes(900), *texts[4:]]):
        blocks = zstd_blocks(contents)
        kind = blocks[4][0] >> 1 & 3
        blocks[4] = bytes([blocks[4][0] | 6]) + blocks[4][1:]  # the reserved kind
        got, error = unpack(b"".join(blocks), 1)
        assert got == b"".join(contents[:4])
        assert f"before byte {sum(map(len, blocks[:4])):,} (compressed): a block of the reserved type" in str(error)
        if kind == 2:  # sequences that point before the start of the data
            blocks = zstd_blocks(contents)
            blocks[4] = blocks[4][:3] + b"\xff" * (len(blocks[4]) - 3)
            got, error = unpack(b"".join(blocks), 1)
            assert got == b"".join(contents[:4])
            assert f"before byte {sum(map(len, blocks[:5])):,} (compressed)" in str(error)


class Trickle(io.RawIOBase):
    """Gives a thousand bytes at a time, and knows how many it gave."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        piece = self.data[self.position : self.position + 1000]
        buffer[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)


@pytest.mark.parametrize("packer", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_decoders_do_not_wait_for_more_when_they_have_some(packer: Pack) -> None:
    """A read into a large buffer gives what has come so far, however slow the source is."""
    data = random.Random(4).randbytes(600_000)
    trickle, got, buffer = Trickle(packer(data)), b"", memoryview(bytearray(1 << 20))
    source = ShardSource(trickle, "x.tar")
    while count := source.readinto(buffer):
        assert trickle.position - len(got) < 200_000  # a block of 128 KiB, and no second one
        got += buffer[:count]
    assert got == data


CFFI = """
import gc, io, random
import zstandard
from torchdata_wds.storage import wrap_stream

random.seed(5)
pieces = [random.randbytes(3000), b"a" * 5000, b"hello world" * 200]
packed = zstandard.ZstdCompressor(write_checksum=True).compress(b"".join(random.choices(pieces, k=120)))
gc.set_threshold(100)
errors = 0
for _ in range(1000):
    damaged = bytearray(packed)
    damaged[random.randrange(9, len(packed))] ^= 64
    try:
        wrap_stream(io.BytesIO(damaged), "x").read()
    except ValueError:
        errors += 1
print(zstandard.backend, errors > 900)
"""


@pytest.mark.slow
def test_the_cffi_backend_of_zstandard_survives_damage() -> None:
    """Its buffers are not among the garbage of an error, where Python would crash when it collects them."""
    pytest.importorskip("zstandard._cffi")
    program = [sys.executable, "-c", CFFI]
    environment = {**os.environ, "PYTHON_ZSTANDARD_IMPORT_POLICY": "cffi"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cffi True\n", "")


def test_zstd_raises_with_the_extra_when_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error says what to install."""
    packed = zstd(DATA)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    _, error = unpack(packed)
    assert isinstance(error, ShardOpenError)
    assert "pip install 'torchdata_wds[zstd]'" in str(error)


@pytest.mark.parametrize("tool", ["gzip", "bzip2", "xz", "zstd"])
def test_decoders_read_what_the_command_line_tools_write(tool: str) -> None:
    """Shards packed by gzip, bzip2, xz and zstd themselves are read back."""
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}")
    data = DATA * 300
    packed = subprocess.run([tool, "-c"], input=data, capture_output=True, check=True).stdout
    assert unpack(packed, 65536) == (data, None)


def test_decoders_stay_small_when_a_bomb_explodes(pack: Pack) -> None:
    """Many MB of zeros in a small shard never stand in memory at once."""
    bomb = pack(bytes(20_000_000)) * 10
    with wrap_stream(io.BytesIO(bomb), "x.tar") as stream:
        tracemalloc.start()
        try:
            for _ in range(25):
                assert len(stream.read(1 << 20)) == 1 << 20
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 12 << 20  # the dictionary of xz alone is 8 MiB


@pytest.mark.parametrize("name", [b"BZh9.jpg", b"(b", b"\x1f\x8bx", b"P*M"])
def test_find_decoder_finds_none_when_a_tar_only_looks_like_it(name: bytes) -> None:
    """A member name that resembles a magic does not make a tar a compressed shard."""
    block = name.ljust(512, b"\0")
    assert unpack(block) == (block, None)


def test_open_shard_reads_past_when_compressed(pack: Pack, tmp_path: Path) -> None:
    """The offset counts decompressed bytes."""
    path = tmp_path / "x.tar"
    path.write_bytes(pack(DATA))
    for offset in (0, 1, 512, len(DATA)):
        with open_shard(path, offset=offset) as stream:
            assert stream.read(len(DATA) + 1) == DATA[offset:]


def test_decoders_read_all_parts_when_they_have_every_size(pack: Pack) -> None:
    """Streams end anywhere in the pieces that a decoder gets, and what it has not used belongs to the next one."""
    sizes = random.Random(5)
    parts = [sizes.randbytes(sizes.choice((0, 1, 30, 700, 5000, 70_000))) for _ in range(40)]
    packed = b"".join(map(pack, parts))
    assert unpack(packed, 65536) == (b"".join(parts), None)
    got, error = unpack(packed[:-1], 65536)
    assert isinstance(error, ShardFormatError)
    assert b"".join(parts).startswith(got)


def test_decoders_get_no_byte_often_when_streams_are_tiny(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each decoder copies what it does not use: in large pieces a thousand streams would take quadratic time."""
    handed = 0
    chunk = CompressedInput.chunk

    def counted(self: CompressedInput) -> bytes:
        nonlocal handed
        data = chunk(self)
        handed += len(data)
        return data

    monkeypatch.setattr(CompressedInput, "chunk", counted)
    one = pack(b"x")
    assert unpack(one * 1000, 65536) == (b"x" * 1000, None)
    assert handed <= 1000 * 2 * (512 + len(one))


def test_xz_says_what_to_do_when_its_dictionary_is_huge() -> None:
    """A file of 100 bytes may ask for 1.5 GiB of memory."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 300 << 20}]
    got, error = unpack(lzma.compress(b"x", filters=filters))
    assert got == b""
    assert isinstance(error, ShardFormatError)
    assert "takes more than 256 MiB of memory to decompress" in str(error)


def test_zstd_raises_when_its_window_is_huge() -> None:
    """A frame may ask for 2 GiB; the command zstd refuses it, too, unless it is told not to."""
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(b"x" * 1000) + packer.flush()
    got, error = unpack(packed)
    assert got == b""
    assert isinstance(error, ShardFormatError)
    assert "takes more than 128 MiB of memory to decompress: its zstd window is larger" in str(error)
    assert "Download it again" not in str(error)


def test_a_stream_raises_again_when_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the shard, and what comes after it is no end."""

    def exhausted(self: CompressedInput) -> bytes:
        raise MemoryError

    monkeypatch.setattr(CompressedInput, "chunk", exhausted)
    with wrap_stream(io.BytesIO(gzip.compress(DATA)), "x.tar") as stream:
        for _ in range(2):
            with pytest.raises(MemoryError):
                stream.read(1)
