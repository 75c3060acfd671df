"""Record shards, byte by byte: whole ones, cut ones, damaged ones, and ones that lie."""

import contextlib
import datetime
import decimal
import io
import random
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import cbor2
import msgpack
import pytest

from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format import records
from torchdata_wds.format.records import read_records

KINDS: dict[str, Callable[[Any], bytes]] = {"cbor": cbor2.dumps, "msgpack": msgpack.packb}
RECORDS: list[Any] = [
    {"__key__": "a", "txt": "größe", "cls": 3, "jpg": bytes(range(40))},
    {"__key__": "b", "list": [1, -1, 2.5, None, True, [[]], {}], "n": 2**40},
    ["no", "dict"],
    {"big": b"x" * 300, "deep": {"a": {"b": {"c": [1]}}}},
]


class Dripping:
    """A stream that gives a few bytes at a time, and fails after so many if asked to."""

    def __init__(self, data: bytes, size: int, fails_at: int | None = None) -> None:
        self._data = io.BytesIO(data)
        self._size = size
        self._fails_at = fails_at

    def read(self, size: int = -1) -> bytes:
        return self._data.read(size)

    def read1(self, size: int) -> bytes:
        if self._fails_at is not None:
            size = min(size, self._fails_at - self._data.tell())
            if not size:
                raise ShardOpenError("the source failed")
        return self._data.read(min(size, self._size))


class ReadOnly:
    """A stream with nothing but read."""

    def __init__(self, data: bytes) -> None:
        self.read = io.BytesIO(data).read


def shard_of(kind: str, values: list[Any] = RECORDS) -> bytes:
    return b"".join(map(KINDS[kind], values))


def read(stream: Any, kind: str, **options: Any) -> tuple[list[Any], Exception | None]:
    """The records before an error, and the error."""
    found: list[Any] = []
    try:
        found.extend(_each(read_records(stream, "x.shard", kind, **options), found))
    except (ShardFormatError, ShardOpenError) as error:
        return found, error
    return found, None


def _each(items: Iterator[Any], found: list[Any]) -> list[Any]:
    for item in items:
        found.append(item)
    return []


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Each format in turn."""
    return str(request.param)


@pytest.mark.parametrize("size", [1, 2, 7, 1000, 1 << 20])
def test_records_equal_what_was_written_when_bytes_come_in_any_pieces(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records may lie across any number of pieces."""
    for patience in (0.0, 1.0):
        monkeypatch.setattr(records, "_PATIENCE", patience)
        assert read(Dripping(shard_of(kind), size), kind) == (RECORDS, None)


@pytest.mark.parametrize("size", [1, 5, 64])
def test_records_equal_what_was_written_when_windows_are_small(
    kind: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every way in which a window may end inside a record."""
    monkeypatch.setattr(records, "_PIECE", size)
    monkeypatch.setattr(records, "_SMALL_PIECE", size)
    for stream in (io.BytesIO(shard_of(kind)), ReadOnly(shard_of(kind))):
        assert read(stream, kind) == (RECORDS, None)


def test_an_empty_shard_gives_no_record(kind: str) -> None:
    """No bytes are no records, and no error."""
    assert read(io.BytesIO(b""), kind) == ([], None)


def test_records_of_any_type_are_given_as_they_are(kind: str) -> None:
    """Falsy records do not end a shard."""
    values = [0, None, "", b"", [], {}, False, 1.5]
    assert read(io.BytesIO(shard_of(kind, values)), kind) == (values, None)


def test_many_records_equal_what_was_written_when_they_fill_many_windows(kind: str) -> None:
    """Small and large records in turn, over several MB."""
    rng = random.Random(4)
    values = [{"n": n, "data": rng.randbytes(rng.choice((0, 10, 1000, 70_000)))} for n in range(300)]
    assert read(io.BytesIO(shard_of(kind, values)), kind) == (values, None)


def test_cbor_tags_become_python_values() -> None:
    """Dates, decimals and sets; unknown tags and references stay data."""
    when = datetime.datetime(2024, 1, 2, tzinfo=datetime.UTC)
    values = [{"when": when, "d": decimal.Decimal("1.50"), "s": {1, 2}}, cbor2.CBORTag(4000, "x")]
    assert read(io.BytesIO(shard_of("cbor", values)), "cbor") == (values, None)
    shared = bytes.fromhex("82d81c8101d81d00")  # [[1], the same]
    assert read(io.BytesIO(shared + shared), "cbor") == ([[[1], [1]]] * 2, None)


def test_cbor_references_of_a_record_do_not_reach_into_the_one_before() -> None:
    """Each record is decoded by itself."""
    found, error = read(io.BytesIO(bytes.fromhex("d81c8101") + bytes.fromhex("d81d00")), "cbor")
    assert found == [[1]]
    assert "record 1" in str(error)


def test_indefinite_cbor_is_read() -> None:
    """Containers and strings without announced lengths."""
    data = bytes.fromhex("9f0102ff") + bytes.fromhex("bf616101ff") + bytes.fromhex("5f41014102ff")
    assert read(io.BytesIO(data * 2), "cbor") == ([[1, 2], {"a": 1}, b"\x01\x02"] * 2, None)


def test_msgpack_extensions_and_odd_keys_stay_data() -> None:
    """Extension types and keys of any type, as in mp fields."""
    values = [{1: msgpack.ExtType(5, b"x"), None: msgpack.Timestamp(3, 4)}]
    assert read(io.BytesIO(shard_of("msgpack", values)), "msgpack") == (values, None)


def test_cuts_are_errors_with_their_byte_when_inside_a_record(kind: str) -> None:
    """At every byte: whole records come first, then an error that names record and bytes; between records none."""
    data = shard_of(kind)
    ends = [0]
    for value in RECORDS:
        ends.append(ends[-1] + len(KINDS[kind](value)))
    for size in range(len(data)):
        whole = max(number for number, end in enumerate(ends) if end <= size)
        found, error = read(io.BytesIO(data[:size]), kind)
        assert found == RECORDS[:whole]
        if size in ends:
            assert error is None
        else:
            assert isinstance(error, ShardFormatError)
            assert f"cut off inside record {whole}, which begins at byte {ends[whole]}" in str(error)
            assert f"ends at byte {size}" in str(error)
            assert error.shard == "x.shard"


def test_failures_of_the_source_come_behind_the_records_before_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every byte: what the source gave before it failed is delivered, and its own error is raised."""
    monkeypatch.setattr(records, "_PATIENCE", 1.0)
    data = shard_of(kind)
    first = len(KINDS[kind](RECORDS[0]))
    for size in (0, 1, first - 1, first, first + 1, len(data) - 1, len(data)):
        found, error = read(Dripping(data, 50, fails_at=size), kind)
        assert found == RECORDS[: (size >= first) + 2 * (size >= len(data) - 1) + (size == len(data))]
        assert str(error) == "the source failed"


def test_flipped_bits_are_errors_or_values_and_never_more(kind: str) -> None:
    """Seeded damage: records before it are right, and nothing but the named error comes, soon."""
    rng = random.Random(f"flips of {kind}")
    data = shard_of(kind)
    for _ in range(2000):
        damaged = bytearray(data)
        places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 3)))]
        for place in places:
            damaged[place] ^= 1 << rng.randrange(8)
        found, error = read(io.BytesIO(bytes(damaged)), kind)
        assert error is None or isinstance(error, ShardFormatError)
        if min(places) >= len(KINDS[kind](RECORDS[0])):
            assert found[:1] == RECORDS[:1]


def test_random_bytes_are_errors_or_values_and_never_more(kind: str) -> None:
    """Seeded noise ends, in values or in the named error."""
    rng = random.Random(f"noise of {kind}")
    for _ in range(2000):
        _, error = read(io.BytesIO(rng.randbytes(rng.randrange(1, 60))), kind)
        assert error is None or isinstance(error, ShardFormatError)


LIES = {
    "cbor": [
        *(bytes([head]) + (2**40).to_bytes(8, "big") for head in (0x5B, 0x7B, 0x9B, 0xBB)),
        (b"\x9b" + (2**40).to_bytes(8, "big")) * 300,
        b"\xc2\x5b" + (2**40).to_bytes(8, "big"),
    ],
    "msgpack": [
        *(bytes([head]) + b"\xff\xff\xff\xff" for head in (0xC6, 0xDB, 0xDD, 0xDF)),
        b"\xdd\x7f\xff\xff\xff" * 300,
        b"\xc9\xff\xff\xff\xff\x01",
    ],
}


def test_announced_sizes_take_no_memory(kind: str) -> None:
    """A header that announces 2**40 bytes or items ends in an error, in a few KB."""
    good = KINDS[kind]({"a": 1})
    for lie in LIES[kind]:
        tracemalloc.start()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found, error = read(io.BytesIO(good + lie + bytes(2000)), kind)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found == [{"a": 1}]
        assert "record 1" in str(error)
        assert peak < 2 << 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


@pytest.mark.parametrize("depth", [2_000, 200_000])
def test_endless_nesting_is_an_error(kind: str, depth: int) -> None:
    """Deep records end in the named error, not in a crash."""
    head = b"\x81" if kind == "cbor" else b"\x91"
    found, error = read(io.BytesIO(KINDS[kind](1) + head * depth + b"\x01"), kind)
    assert found == [1]
    assert "record 1, which begins at byte 1" in str(error)


def test_large_cbor_records_are_not_asked_for_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for each number takes thirty times as long; only the largest records are read so, and what is damaged."""
    items = []
    monkeypatch.setattr(records, "_Item", lambda *args, item=records._Item: items.append(args) or item(*args))
    values = [list(range(size)) for size in (10, 30_000, 100_000, 5, 60_000)]
    assert read(io.BytesIO(shard_of("cbor", values)), "cbor") == (values, None)
    assert items == []
    monkeypatch.setattr(records, "_MAX_WINDOW", 200_000)
    assert read(io.BytesIO(shard_of("cbor", values)), "cbor") == (values, None)
    assert len(items) == 1


def test_records_over_the_limit_are_errors(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts for records inside one window as for others, and not for a whole shard."""
    values = [{"a": b"x" * 80}] * 5
    large = [*values, {"a": b"x" * 100_000}, *values]
    assert read(io.BytesIO(shard_of(kind, values)), kind, max_bytes=100) == (values, None)
    for size in (10, 1 << 16):
        monkeypatch.setattr(records, "_PIECE", size)
        found, error = read(io.BytesIO(shard_of(kind, large)), kind, max_bytes=100)
        assert found == values
        assert "record 5" in str(error)
        assert "max_bytes=100" in str(error)


@pytest.mark.parametrize("text", [b"<html><body>404 Not Found</body></html>\n", b'{"a": 1, "b": 2, "c": 3}\r\n\t'])
def test_text_is_no_msgpack(text: bytes) -> None:
    """Text would pass for a stream of small numbers."""
    found, error = read(io.BytesIO(text), "msgpack")
    assert found == []
    assert "is text, and no msgpack" in str(error)
    numbers = list(range(60, 128))
    assert read(io.BytesIO(shard_of("msgpack", [0, *numbers])), "msgpack") == ([0, *numbers], None)


def test_tar_shards_are_recognised(kind: str) -> None:
    """A tar shard names the form that reads it."""
    from tests.kits.shards import tar_bytes, text_samples

    found, error = read(io.BytesIO(tar_bytes(text_samples("s", 2))), kind)
    assert found == []
    assert "load_wds_shards" in str(error)


def test_memory_holds_one_record_at_a_time(kind: str) -> None:
    """A shard of 64 MB is read in a few."""

    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self.left = 64
            self.record = KINDS[kind]({"data": bytes(1 << 20)})
            self.rest = b""

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            if not self.rest and self.left:
                self.left -= 1
                self.rest = self.record
            size = min(len(buffer), len(self.rest))
            buffer[:size], self.rest = self.rest[:size], self.rest[size:]
            return size

    tracemalloc.start()
    count = sum(1 for _ in read_records(io.BufferedReader(Endless(), 1 << 16), "x", kind))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 64
    assert peak < 12 << 20


def test_a_missing_package_is_named_with_its_extra(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, and no handler skips it."""
    package = {"cbor": "cbor2", "msgpack": "msgpack"}[kind]
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ShardOpenError, match=rf"package {package}.*torchdata_wds\[{kind}\]") as caught:
        next(read_records(io.BytesIO(b""), "x", kind))
    assert isinstance(caught.value.__cause__, ImportError)


@pytest.mark.slow
def test_campaign_of_damage(kind: str) -> None:
    """Many more seeded flips, cuts and insertions."""
    rng = random.Random(f"campaign of {kind}")
    for _ in range(20_000):
        damaged = bytearray(shard_of(kind))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(damaged))
            with contextlib.suppress(IndexError):
                rng.choice((_flip, _drop, _insert))(damaged, place, rng)
        _, error = read(io.BytesIO(bytes(damaged)), kind)
        assert error is None or isinstance(error, ShardFormatError)


def _flip(data: bytearray, place: int, rng: random.Random) -> None:
    data[place] ^= 1 << rng.randrange(8)


def _drop(data: bytearray, place: int, rng: random.Random) -> None:
    del data[place : place + rng.randrange(1, 9)]


def _insert(data: bytearray, place: int, rng: random.Random) -> None:
    data[place:place] = rng.randbytes(rng.randrange(1, 9))
