"""Windows: what is read many at once is what is read one by one, in every result, error and count."""

import io
import os
import tarfile
import time
from collections import Counter
from contextlib import ExitStack
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits import tar_kinds
from tests.kits.readers import READERS, Sizes, reading_with
from tests.kits.shards import tar_bytes
from tests.kits.tar_blocks import END, block, member, record
from torchdata_wds.errors import ShardFormatError, ShardOpenError
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.tar import ReadOptions, read_marked_members, read_members
from torchdata_wds.format.tar.fast import LookAhead
from torchdata_wds.format.tar.members import Mark, MemberRun, PassedMember, singles
from torchdata_wds.format.windows import find_members

KEYS = st.sampled_from(
    ["a", "b", "c", "A", "d/a", "d.v1/a", "./a", "././a", "é", "\n", "x" * 97, "y" * 120, "d/" * 60 + "k"]
)
ENDS = st.sampled_from([".txt", ".TXT", ".cls", ".seg.png", "", ".", "..jpg", ".__key__", ".\n"])
ODD = st.sampled_from(["__meta__/x.json", "._a.jpg", "d/.hidden.jpg", "__index__", ".DS_Store", "__a.jpg", "a__b.jpg"])
FILES = st.tuples(st.builds(str.__add__, KEYS, ENDS) | ODD, st.sampled_from([0, 1, 511, 512, 700, 3000]))
#: Runs of samples as they should be, and whatever comes.
MEMBERS = st.lists(FILES, max_size=6) | st.integers(0, 12).map(
    lambda count: [(f"{number:03d}.{field}", 10) for number in range(count) for field in ("cls", "json", "txt")]
)
#: How a member is written: plainly, with dates and other records, or as something that is no file.
RECORDS = {
    "accessed": {"atime": "1700000000.123456789", "ctime": "1.5"},
    "dated long ago": {"mtime": "-" + "1" * 100},
    "commented": {"atime": "1.5", "comment": "mtime=1\n16 mtime=2"},
}
KINDS = st.lists(
    st.sampled_from(["file"] * 8 + ["dated"] * 2 + ["folder", "link", "contiguous", "global", *RECORDS]), min_size=1
)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def build(members: list[tuple[str, int]], kinds: list[str], tar_format: int, inner: bytes = b"") -> bytes:
    """An archive of members of these sizes; those whose name a format cannot hold are left out."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as archive:
        for number, (name, size) in enumerate(members):
            info = tarfile.TarInfo(name)
            kind = kinds[number % len(kinds)]
            info.mtime = 1.5 if kind == "dated" else 0
            info.pax_headers = RECORDS.get(kind, {})
            info.type = {"folder": tarfile.DIRTYPE, "link": tarfile.LNKTYPE, "contiguous": tarfile.CONTTYPE}.get(
                kind, tarfile.REGTYPE
            )
            info.linkname = members[0][0] if kind == "link" else ""
            data = (inner or bytes([number % 256]))[:size].ljust(size, b"u")
            info.size = 0 if kind in ("folder", "link") else size
            if kind == "global" and tar_format == tarfile.PAX_FORMAT:
                out.write(tarfile.TarInfo.create_pax_global_header({"comment": "x"}))
                archive.offset = out.tell()
            try:
                archive.addfile(info, io.BytesIO(data[: info.size]) if info.size else None)
            except ValueError:
                continue
    return out.getvalue()


class Trickle(io.RawIOBase):
    """A source that gives a few bytes at a time, and perhaps fails at the end."""

    def __init__(self, data: bytes, step: int, failure: Exception | None) -> None:
        self._data = io.BytesIO(data)
        self._step = step
        self._failure = failure

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        data = self._data.read(min(self._step, len(view)))
        if not data and self._failure is not None:
            raise self._failure
        view[: len(data)] = data
        return len(data)


def stored(data: bytes) -> io.FileIO:
    """A file of the system, which can be sought."""
    file = io.FileIO(os.memfd_create("x.tar"), "r+")
    file.write(data)
    file.seek(0)
    return file


def outcome(archive: bytes, sizes: Sizes, step: int, failure: Exception | None, **options: Any) -> list[Any]:
    """Everything that reading and grouping an archive gives: members and marks, samples, errors, counts.

    It is read from a file if `step` is 0.
    """
    found: list[Any] = []
    rules = {"on_reappearing": options.pop("on_reappearing", "error"), "fields": options.pop("fields", None)}
    select = options.pop("select", None)

    def units(skipped: Counter[str]) -> Any:
        source = Trickle(archive, step, failure) if step else stored(archive)
        chosen = ReadOptions(select, None, 1, "x.tar", lambda offset: io.BytesIO(archive[offset:]), **options)
        with io.BufferedReader(source, 1024) as stream:
            try:
                yield from read_marked_members(stream, "x.tar", chosen, skipped)
            except Exception as error:
                yield Mark.BROKEN
                found.append((type(error), str(error)))

    def go_on(error: Exception) -> bool:
        found.append((type(error), str(error)))
        return True

    with reading_with(sizes):
        members, samples = Counter[str](), Counter[str]()
        found.append([item.name if isinstance(item, PassedMember) else item for item in singles(units(members))])
        found.append(list(group_members(units(samples), on_error=go_on, skipped=samples, **rules)))
    return [*found, members, samples]


def changed(archive: bytes, data: st.DataObject) -> bytes:
    """The archive with some of its bytes changed, or cut, or doubled."""
    how = data.draw(st.sampled_from(["not", "byte", "cut", "twice", "block"]))
    place = data.draw(st.integers(0, len(archive) - 1))
    if how == "byte":
        return archive[:place] + bytes([data.draw(st.integers(0, 255))]) + archive[place + 1 :]
    if how == "block":
        start = place // 512 * 512
        return archive[:start] + data.draw(st.sampled_from([bytes(512), archive[:512]])) + archive[start:]
    return {"not": archive, "cut": archive[:place], "twice": archive + archive}[how]


def check_equal(data: st.DataObject) -> None:
    """Draws an archive, damages it, and compares all readers."""
    kinds = data.draw(KINDS)
    archive = build(data.draw(MEMBERS), kinds, data.draw(FORMATS))
    if data.draw(st.booleans()):  # tars inside a tar
        archive = build(data.draw(MEMBERS), kinds, data.draw(FORMATS), archive)
    archive = changed(archive, data)
    options = {
        "require_end_marker": data.draw(st.booleans()),
        "concatenated": data.draw(st.booleans()),
        "on_reappearing": data.draw(st.sampled_from(["error", "allow"])),
        "fields": data.draw(st.sampled_from([None, "txt", "txt cls"])),
        "select": data.draw(st.sampled_from([None, None, "*.txt"])),
    }
    failure = data.draw(st.sampled_from([None, None, ShardOpenError("the source failed")]))
    step = data.draw(st.sampled_from([100, 512, 1000, 100_000, *([0] * 4 if failure is None else [])]))
    odd_sizes = [(512, 512, 0), (700, 1400, 0), (700, 1400, 1 << 60)]
    windows = data.draw(st.sampled_from([*odd_sizes, *list(READERS.values())[1:]]))
    plain = outcome(archive, READERS["one by one"], step, failure, **options)
    assert outcome(archive, windows, step, failure, **options) == plain


@given(st.data())
@settings(max_examples=70, deadline=None)
def test_windows_give_what_reading_one_by_one_gives(data: st.DataObject) -> None:
    """Members, marks, samples, errors with their text, and counts are equal, whatever is wrong with an archive."""
    check_equal(data)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=400, deadline=None)
def test_windows_give_what_reading_one_by_one_gives_in_a_long_campaign(data: st.DataObject) -> None:
    """The same, very often."""
    check_equal(data)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_windows_agree_with_the_plain_reader_on_seeded_archives(part: int) -> None:
    """20,000 archives, 5,000 in each part: sound ones and all kinds on which tar programs differ."""
    differing = []
    rows = [None, *tar_kinds.DIFFERENT]
    for seed in range(part * 5000, part * 5000 + 5000):
        random = Random(seed)
        archive = tar_kinds.by_tarfile(random) if seed % 4 == 0 else tar_kinds.hand_made(random, random.choice(rows))
        plain = outcome(archive, READERS["one by one"], 100_000, None)
        differing += [
            (seed, sizes, step)
            for sizes in (*list(READERS.values())[3:], (random.choice([512, 1536]), 4096, random.choice([0, 1 << 60])))
            for step in (100_000, 0)
            if outcome(archive, sizes, step, None) != plain
        ]
    assert not differing


@pytest.mark.parametrize("dates", ["", "mtime", "mtime atime ctime", "mtime xtime", "time"])
@pytest.mark.parametrize("damage", ["", "length", "end", "zeros", "size"])
def test_windows_take_dates_only_where_each_record_is_sound(dates: str, damage: str) -> None:
    """A header of dates is passed over together with others; one that is damaged is left to the plain reader."""
    records = [record(date, "1700000000.25") for date in dates.split()]
    if damage == "length" and records:
        records[-1] = b"9" + records[-1][1:]
    content = b"".join(records)
    if damage == "end":
        content = content[:-1] + b"x"
    content += bytes(3) if damage == "zeros" else b""
    size = len(content) + (700 if damage == "size" else 0)
    archive = block(b"x", size, b"x") + content.ljust(-(-size // 512) * 512, b"\0")
    archive = member(b"a.txt", b"A") + archive + member(b"b.txt", b"B") + bytes(1024)
    plain = outcome(archive, READERS["one by one"], 100_000, None)
    for sizes in READERS.values():
        assert outcome(archive, sizes, 100_000, None) == plain


def runs(archive: bytes, sizes: Sizes = READERS["large windows"]) -> list[list[str]]:
    """The names that come together; a member that comes alone as a list of its own name."""
    options = ReadOptions(visit=1, shard="x.tar")
    with reading_with(sizes):
        units = list(read_marked_members(io.BytesIO(archive), "x.tar", options, Counter()))
    return [item.names if isinstance(item, MemberRun) else [item.name] for item in units if not isinstance(item, Mark)]


TEN = [(f"{number}.txt", 10) for number in range(10)]


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("front", ["", "./", "d/" * 60, "é", "n" * 120])
@pytest.mark.parametrize("kind", ["file", "dated"])
def test_windows_take_what_tar_writers_write(tar_format: int, front: str, kind: str) -> None:
    """Long names, folders, names beyond ASCII and dates in PAX records do not stop a run."""
    members = [(front + name, size) for name, size in TEN]
    archive = build(members, [kind], tar_format)
    assert runs(archive) == ([[name for name, _ in members]] if len(archive) > 10240 or front != "n" * 120 else [])


@pytest.mark.parametrize("dates", ["mtime", "mtime atime"])
def test_runs_from_header_to_header_go_on_after_other_entries(dates: str) -> None:
    """Dates, and blanks after the checksum, do not stop a run; a folder or a link does, and the next goes on."""
    content = b"".join(record(date, "1700000000.25") for date in dates.split())
    dated = block(b"x", len(content), b"x") + content.ljust(512, b"\0")
    a, b, c = (dated + member(name, b"A") for name in (b"a.txt", b"b.txt", b"c.txt"))
    folder, link = block(b"d/", kind=b"5"), block(b"l", kind=b"2")
    blanks = block(b"e.txt", checksum=lambda total: b"%06o  " % total)
    found = runs(a + b + folder + c + link + blanks + END, READERS["large windows from header to header"])
    assert found == [["a.txt", "b.txt"], ["c.txt"], ["e.txt"]]


def test_windows_go_on_after_tars_inside_members() -> None:
    """A tar in a member breaks a run, and none of its members is taken for one of the shard."""
    inner = build(TEN, ["file"], tarfile.USTAR_FORMAT)
    archive = build([("a.tar", len(inner)), ("a.cls", 1), ("b.tar", len(inner)), ("b.cls", 1)], ["file"], 0, inner)
    assert runs(archive) == [["a.tar"], ["a.cls", "b.tar"], ["b.cls"]]


def test_windows_leave_old_archives_to_the_other_reader() -> None:
    """Headers without ustar magic, as of V7 tar, are read one by one."""
    archive = bytearray(build(TEN, ["file"], tarfile.USTAR_FORMAT))
    for place in range(0, 20 * 512, 1024):
        archive[place + 257 : place + 265] = bytes(8)
        archive[place + 148 : place + 156] = b" " * 8
        archive[place + 148 : place + 156] = b"%06o\0 " % sum(archive[place : place + 512])
    assert runs(bytes(archive)) == [[name] for name, _ in TEN]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_member_that_a_window_cuts_begins_the_next_one(is_cut: bool) -> None:
    """In a file, where reading can go back to it: members come in runs, and a file that is cut stays cut."""
    members = [(f"{number}.bin", 20_000 + 7 * number) for number in range(200)]
    archive = build(members, ["file", "dated"], tarfile.PAX_FORMAT)
    end = archive.rindex(b"199.bin") + 5000 if is_cut else len(archive)
    runs: list[Any] = []
    with io.BufferedReader(stored(archive[:end])) as stream, ExitStack() as stack:
        if is_cut:
            stack.enter_context(pytest.raises(ShardFormatError, match=r"199\.bin"))
        for unit in read_marked_members(stream, "x.tar", ReadOptions(), Counter()):
            runs += [unit] if isinstance(unit, MemberRun) else []
    names = [name for run in runs for name in run.names]
    assert names == [name for name, _ in members[2 : 199 if is_cut else 200]]


@pytest.mark.parametrize("is_strict", [False, True])
def test_a_file_that_is_cut_while_it_is_read_is_reported(is_strict: bool) -> None:
    """Also where reading has gone back to a member, which is then no longer there."""
    archive = build([(f"{number}.bin", 9000) for number in range(300)], ["file"], tarfile.USTAR_FORMAT)
    count = 0
    with io.BufferedReader(file := stored(archive)) as stream, pytest.raises(ShardFormatError, match="inside member"):
        for unit in read_marked_members(stream, "x.tar", ReadOptions(require_end_marker=is_strict), Counter()):
            count += len(unit.names) if isinstance(unit, MemberRun) else 1
            if count >= 5:
                file.truncate(0)
    assert 5 <= count < 20


@pytest.mark.parametrize("old", [b"", b"old"])
@pytest.mark.parametrize("sizes", READERS.values())
def test_links_to_members_that_are_left_out_give_their_content(sizes: Sizes, old: bytes) -> None:
    """From a file that cannot be opened again, also if a window cuts the member, which an older one is named as."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        fill = [(f"{number}.txt", b"x" * 100) for number in range(200)]
        last = [(f"z{number}.txt", b"x") for number in range(5)]
        for name, data in [*([("a.bin", old)] if old else []), *fill, ("a.bin", b"new" * 50_000), *last]:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("link.txt")
        info.type, info.linkname = tarfile.LNKTYPE, "a.bin"
        archive.addfile(info)
    with reading_with(sizes), io.BufferedReader(stored(out.getvalue())) as stream:
        found = {member.name: member.data for member in read_members(stream, "x.tar", select="*.txt")}
    assert found["link.txt"] == b"new" * 50_000


@pytest.mark.parametrize("step", [0, 100_000])
@pytest.mark.parametrize("sizes", list(READERS.values())[1:])
def test_whole_samples_come_before_the_error_of_select(sizes: Sizes, step: int) -> None:
    """The sample before the member at which it raises is whole."""

    def select(name: str) -> bool:
        if name == "7.txt":
            raise ValueError("a mistake")
        return True

    archive = build(TEN, ["file"], tarfile.USTAR_FORMAT)
    plain = outcome(archive, READERS["one by one"], 0, None, select=select)
    assert [sample["__key__"] for sample in plain[-3] if isinstance(sample, dict)] == [str(key) for key in range(7)]
    assert outcome(archive, sizes, step, None, select=select) == plain


@pytest.mark.parametrize("sizes", list(READERS.values())[1:])
def test_a_global_name_is_that_of_all_members(sizes: Sizes) -> None:
    """As `TarEntries` has it, which takes GNU's second record of a name as it takes the first."""
    name = tarfile.TarInfo.create_pax_global_header({"GNU.sparse.name": "all.txt"})
    archive = name + build(TEN, ["file"], tarfile.USTAR_FORMAT)
    plain = outcome(archive, READERS["one by one"], 100_000, None)
    assert outcome(archive, sizes, 100_000, None) == plain


def test_windows_pause_when_members_are_large() -> None:
    """Large members are read straight into their own bytes; small ones behind them come in windows again."""
    members = [("0.bin", 1 << 20), *((f"{number}.bin", 150_000) for number in range(1, 140)), *TEN * 60]
    found = runs(build(members, ["file"], tarfile.USTAR_FORMAT))
    assert found[0] == ["0.bin"]
    assert sum(len(run) == 1 for run in found) >= 128
    assert max(map(len, found)) > 100


class Counting(io.BytesIO):
    """Counts what is asked for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.sizes: list[int] = []

    def read1(self, size: int | None = -1, /) -> bytes:
        self.sizes.append(size or 0)
        return super().read1(size)


@pytest.mark.slow
def test_windows_begin_small_and_grow() -> None:
    """The first members come alone, which shows how large they are; then windows grow from 64 KiB to 1.5 MiB."""
    stream = Counting(build([(f"{number}.txt", 500) for number in range(9000)], ["file"], tarfile.USTAR_FORMAT))
    members = read_members(stream, "x.tar")
    next(members)
    assert stream.sizes == []
    list(members)
    assert [size for size in stream.sizes if size > 512][:5] == [1 << 16, 1 << 18, 1 << 20, 3 << 19, 3 << 19]


def test_windows_do_not_wait_when_a_source_is_slow() -> None:
    """What has come is given out before the window is full."""
    archive = build(TEN, ["file"], tarfile.USTAR_FORMAT)

    class Slow(Trickle):
        def readinto(self, buffer: Any) -> int:
            time.sleep(0.03)
            assert self._data.tell() <= 2048, "read on before the first members were given out"
            return super().readinto(buffer)

    assert next(read_members(io.BufferedReader(Slow(archive, 1024, None)), "x.tar")).name == "0.txt"


def test_windows_give_what_came_before_a_failure() -> None:
    """Members that lie whole before the place where a source fails come first, then its error, again and again."""
    archive = build(TEN, ["file"], tarfile.USTAR_FORMAT)[:5000]
    with reading_with(READERS["large windows"]):
        ahead = LookAhead(io.BufferedReader(Trickle(archive, 700, ShardOpenError("the source failed"))), "x.tar", 1)
    taken = ahead.take()
    assert taken is not None
    run, length = taken
    assert isinstance(run, MemberRun)
    assert length == 4096
    assert [member.name for member in run.members()] == ["0.txt", "1.txt", "2.txt", "3.txt"]
    assert ahead.read(512)[:5] == b"4.txt"
    for _ in range(2):
        with pytest.raises(ShardOpenError, match="the source failed"):
            ahead.read(512)


@pytest.mark.parametrize("place", [0, 100, 124, 135, 148, 155, 156, 300, 345, 500])
def test_find_members_leaves_out_what_has_a_wrong_header(place: int) -> None:
    """One changed byte, anywhere in a header, and the member is left to the reader that says what is wrong."""
    archive = bytearray(tar_bytes([("a.txt", b"A"), ("b.txt", b"B"), ("c.txt", b"C")]))
    archive[1024 + place] ^= 1
    assert find_members(bytes(archive)).names == ["a.txt", "c.txt"]


def test_find_members_gives_places_of_headers_and_payloads() -> None:
    """Places are byte offsets, and a long name's own header belongs to its member."""
    archive = tar_bytes([("a.txt", b"A" * 600), ("n" * 120 + ".txt", b"B")], tar_format=tarfile.GNU_FORMAT)
    window = find_members(archive)
    assert list(window.begins) == [0, 1536]
    assert list(window.nexts) == [1536, 1536 + 1024 + 1024]
    assert [archive[start:end] for start, end in zip(window.starts, window.ends, strict=True)] == [b"A" * 600, b"B"]
    assert window.members_at(0) == (window.names, window.starts, window.ends, window.nexts[1])
    assert window.members_at(1536) == (window.names[1:], window.starts[1:], window.ends[1:], window.nexts[1])
    assert window.members_at(512) == ((), (), (), 512)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1000])
def test_find_members_finds_none_when_there_is_no_room(size: int) -> None:
    """Less than a header, zeros, and text hold no members; the bytes are kept."""
    for data in (bytes(size), b"text" * (size // 4)):
        assert not find_members(data).names
        assert find_members(data).data == data
