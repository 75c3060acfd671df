"""The SQLite file of a sample cache: complete or not there, whatever happens to its writer."""

import contextlib
import errno
import fcntl
import os
import random
import resource
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.processes import in_child, is_alive, open_files, wait_until
from tests.kits.storage_kit import names
from torchdata_wds.errors import CacheError
from torchdata_wds.storage.cache import sample_file
from torchdata_wds.storage.cache.sample_file import PART, SampleReader, SampleWriter, begin_samples, open_samples

ROWS = [f"sample {number} ".encode() * (number % 7) for number in range(50)]


def begun(path: Path) -> SampleWriter:
    writer = begin_samples(path)
    assert writer is not None
    return writer


def opened(path: Path) -> SampleReader:
    reader = open_samples(path)
    assert reader is not None
    return reader


def write(path: Path, rows: list[bytes] = ROWS, *, ended: bool = True, pickles: bool = False) -> None:
    writer = begun(path)
    for row in rows:
        writer.append(row)
    assert writer.finish(ended=ended, pickles=pickles)


def read(path: Path, limit: int | None = None) -> list[bytes]:
    with opened(path) as reader:
        return list(reader.rows(limit))


class Failing:
    """A system call that fails."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __call__(self, *arguments: object) -> None:
        raise OSError(self.code, "failed")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A name in a folder that does not exist yet; nothing is left open."""
    before = open_files()
    yield tmp_path / "new" / "folder" / "cache.db"
    assert open_files() <= before


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_rows_read_back_in_their_order(path: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of transactions; the folder is made, and nothing else is left in it."""
    monkeypatch.setattr(sample_file, "_BATCH_COUNT", batch)
    write(path, ended=False, pickles=True)
    assert read(path) == ROWS
    assert read(path, 3) == ROWS[:3]
    assert read(path, 1000) == ROWS
    with opened(path) as reader:
        assert reader.facts == (50, False, True, 1)
    assert names(path.parent) == ["cache.db"]


def test_large_rows_read_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows larger than a page and than a transaction."""
    monkeypatch.setattr(sample_file, "_BATCH_BYTES", 100_000)
    rows = [os.urandom(size) for size in (1, 300_000, 0, 99_999, 20_000)]
    write(path, rows)
    assert read(path) == rows


def test_a_file_without_rows_reads_back(path: Path) -> None:
    """Zero samples are complete too."""
    write(path, [])
    assert read(path) == []


def test_nothing_has_the_name_while_it_is_written(path: Path) -> None:
    """What is there is called a part, and goes with its writer."""
    writer = begun(path)
    for row in ROWS:
        writer.append(row)
    assert open_samples(path) is None
    assert names(path.parent) == ["cache.db" + PART]
    writer.abort()
    writer.abort()
    assert names(path.parent) == []


def test_a_second_writer_is_refused_while_the_first_lives(path: Path) -> None:
    """In this process and in another; afterwards it may."""
    writer = begun(path)
    assert begin_samples(path) is None
    assert in_child(lambda: os._exit(3 if begin_samples(path) is None else 4)) == 3
    writer.append(b"x")
    assert writer.finish(ended=True, pickles=False)
    assert read(path) == [b"x"]
    begun(path).abort()
    assert read(path) == [b"x"]


def test_a_forked_child_does_no_harm_to_the_writer(path: Path) -> None:
    """A child that lets go of its copy, or lives on, changes neither file nor lock."""
    writer = begun(path)
    for row in ROWS[:20]:
        writer.append(row)

    def let_go() -> None:
        writer.abort()
        assert begin_samples(path) is None

    assert in_child(let_go) == 0
    pid = os.fork()
    if not pid:
        time.sleep(30)
        os._exit(0)
    try:
        for row in ROWS[20:]:
            writer.append(row)
        assert writer.finish(ended=True, pickles=False)
        path.unlink()
        write(path)  # although the child has a copy of the first lock
        assert read(path) == ROWS
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_writer_whose_part_was_deleted_leaves_that_of_the_next_alone(path: Path) -> None:
    """It neither gives its name to what another is writing, nor deletes it."""
    for ends in (lambda writer: writer.finish(ended=True, pickles=False), lambda writer: writer.abort()):
        first = begun(path)
        first.append(b"first")
        path.with_name("cache.db.part").unlink()
        second = begun(path)
        assert not ends(first)
        assert open_samples(path) is None
        second.append(b"second")
        assert second.finish(ended=True, pickles=False)
        assert read(path) == [b"second"]
        path.unlink()


def test_what_a_killed_writer_left_is_begun_anew(path: Path) -> None:
    """A part of any content: rows without an end, no bytes, zero bytes."""
    pid = os.fork()
    if not pid:
        writer = begun(path)
        writer.append(b"old" * 3_000_000)
        time.sleep(30)
        os._exit(0)
    part = path.with_name(path.name + PART)
    assert wait_until(lambda: part.exists() and part.stat().st_size > 9_000_000)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert open_samples(path) is None
    write(path)
    assert read(path) == ROWS
    for left in (b"", bytes(5000)):
        path.unlink()
        part.write_bytes(left)
        write(path)
        assert read(path) == ROWS


def test_a_name_that_is_taken_meanwhile_is_left(path: Path) -> None:
    """Whoever has it keeps it; the part goes."""
    writer = begun(path)
    writer.append(b"x")
    path.write_bytes(b"mine")
    assert not writer.finish(ended=True, pickles=False)
    assert path.read_bytes() == b"mine"
    assert names(path.parent) == ["cache.db"]


def _database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE samples (number INTEGER PRIMARY KEY, crc INTEGER, data BLOB)")
        connection.commit()


FOREIGN = {
    "text": lambda path: path.write_text("a list of things"),
    "nothing": lambda path: path.write_bytes(b""),
    "a database": _database,
    "a folder": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to nowhere that is a folder": lambda path: path.symlink_to(path.parent),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files_are_refused_and_left(name: str, path: Path) -> None:
    """Whatever is no sample cache is an error that names the file."""
    path.parent.mkdir(parents=True)
    FOREIGN[name](path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(CacheError, match=r"cache.db cannot be used: .*choose another file"):
        open_samples(path)
    assert before is None or path.read_bytes() == before


@pytest.mark.parametrize("name", ["text", "a database", "a folder", "a pipe", "a link to nowhere that is a folder"])
def test_foreign_files_with_the_name_of_a_part_are_refused_and_left(name: str, path: Path) -> None:
    """Nothing is emptied that this package did not write."""
    path.parent.mkdir(parents=True)
    part = path.with_name(path.name + PART)
    FOREIGN[name](part)
    before = part.read_bytes() if part.is_file() else None
    with pytest.raises(CacheError, match=r"cache.db"):
        begin_samples(path)
    assert os.path.lexists(part)
    assert before is None or part.read_bytes() == before


def test_a_link_with_the_name_of_a_part_is_not_followed(path: Path) -> None:
    """It would have another cache emptied."""
    write(path)
    other = path.with_name("other.db")
    other.with_name(other.name + PART).symlink_to(path)
    with pytest.raises(CacheError, match="cannot be written"):
        begin_samples(other)
    assert read(path) == ROWS


def test_a_file_is_written_where_there_are_no_locks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none; another failure is one."""
    for code in (errno.ENOLCK, errno.EIO):
        monkeypatch.setattr(fcntl, "flock", Failing(code))
        with contextlib.nullcontext() if code == errno.ENOLCK else pytest.raises(CacheError, match="cannot be written"):
            write(path)
        assert path.exists() == (code == errno.ENOLCK)
        path.unlink(missing_ok=True)
        path.with_name(path.name + PART).unlink(missing_ok=True)


def test_a_file_that_computes_its_rows_is_refused(path: Path) -> None:
    """What a view gives may never end."""
    write(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("""
            ALTER TABLE samples RENAME TO rows;
            CREATE VIEW samples AS WITH RECURSIVE n(number) AS (SELECT 0 UNION ALL SELECT number + 1 FROM n)
                SELECT number, 0 AS crc, x'' AS data FROM n WHERE number < 0;
        """)
    with pytest.raises(CacheError, match=r"cache.db is damaged: it has other tables"):
        open_samples(path)


def test_a_file_that_is_deleted_while_it_is_opened_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its head is read, and before SQLite opens it."""
    for name in ("_head_of", "_connect"):
        write(path)
        original = getattr(sample_file, name)

        def late(path: Path, *rest: Any, original: Any = original) -> Any:
            path.unlink()
            return original(path, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(sample_file, name, late)
            assert open_samples(path) is None


def test_other_versions_are_refused(path: Path) -> None:
    """A file of a later version is not misread."""
    write(path)
    data = bytearray(path.read_bytes())
    data[63] = 2
    path.write_bytes(data)
    with pytest.raises(CacheError, match="version 2, expected 1"):
        open_samples(path)


def test_cut_files_are_errors(path: Path) -> None:
    """A copy that lacks its end is found out before the first row."""
    write(path, [os.urandom(9000) for _ in range(30)])
    data = path.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 20_000, 4096, 100):
        path.write_bytes(data[:size])
        with pytest.raises(CacheError, match=r"damaged: it is cut off.*Delete it"):
            open_samples(path)


def test_flipped_bits_are_errors_or_nothing(path: Path) -> None:
    """Seeded damage: rows are right or there is the named error, never another row."""
    rows = [random.Random(number).randbytes(500) for number in range(200)]
    write(path, rows)
    data = path.read_bytes()
    rng = random.Random("flips")
    failed = 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found: list[bytes] = []
        try:
            with opened(path) as reader:
                found.extend(_each(reader.rows(), found))
            assert found == rows
        except CacheError:
            failed += 1
        assert found == rows[: len(found)]
    assert failed > 20


def _each(rows: Iterator[bytes], found: list[bytes]) -> list[bytes]:
    for row in rows:
        found.append(row)
    return []


def test_missing_rows_are_errors(path: Path) -> None:
    """A file that somebody has edited does not serve fewer samples than it says."""
    for statement in (
        "DELETE FROM samples WHERE number = 7",
        "UPDATE samples SET number = 99 WHERE number = 7",
        "DELETE FROM samples",
        "UPDATE samples SET data = 'text'",
    ):
        path.unlink(missing_ok=True)
        write(path)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
            connection.commit()
        with pytest.raises(CacheError, match="missing or damaged"):
            read(path)
    for statement in ("UPDATE facts SET value = 7 WHERE name = 'samples'", "DELETE FROM facts", "DROP TABLE facts"):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
            connection.commit()
        with pytest.raises(CacheError, match=r"does not say how many|has other tables"):
            open_samples(path)


@pytest.mark.parametrize(
    "name", ["a b.db", "100%41.db", "what?mode=ro#1.db", os.fsdecode(b"\xff.db"), "x.part", "ä.db"]
)
def test_any_name_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are taken verbatim, relative ones too."""
    write(tmp_path / name)
    assert read(tmp_path / name) == ROWS
    assert names(tmp_path) == [name]
    monkeypatch.chdir(tmp_path)
    assert read(Path(name)) == ROWS


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match=r"cannot be written.*choose a file in a folder"):
        begin_samples(tmp_path / "file" / "cache.db")
    with pytest.raises(CacheError, match="cannot be used"):
        open_samples(tmp_path / "file" / "cache.db")


def test_a_full_disk_is_an_error(path: Path) -> None:
    """What does not fit raises, and leaves nothing."""

    def fill() -> None:
        writer = begun(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(CacheError, match="cannot be written"):
            for _ in range(30):
                writer.append(os.urandom(1 << 20))
        writer.abort()
        assert names(path.parent) == []

    assert in_child(fill) == 0


def test_rows_are_streamed(path: Path) -> None:
    """Reading holds one row, not the file."""
    import tracemalloc

    write(path, [bytes([number]) * (1 << 20) for number in range(20)])
    tracemalloc.start()
    with opened(path) as reader:
        assert sum(1 for _ in reader.rows()) == 20
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20


@pytest.mark.slow
def test_killing_writers_40_times_leaves_nothing_incomplete(tmp_path: Path) -> None:
    """At any moment the file is not there, or whole."""
    path = tmp_path / "cache.db"
    rng = random.Random("kills")
    rows = [random.Random(number).randbytes(20_000) for number in range(400)]
    finished = 0
    for _ in range(40):
        pid = os.fork()
        if not pid:
            try:
                sample_file._BATCH_BYTES = 100_000
                write(path, rows)
            finally:
                os._exit(0)
        time.sleep(rng.random() * 0.08)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert not is_alive(pid)
        if open_samples_closed(path):
            finished += 1
            assert read(path) == rows
            path.unlink()
    write(path, rows)
    assert read(path) == rows
    assert finished < 40


def open_samples_closed(path: Path) -> bool:
    reader = open_samples(path)
    if reader is not None:
        reader.close()
    return reader is not None


@pytest.mark.slow
def test_many_writers_of_one_file_leave_one_whole_file(tmp_path: Path) -> None:
    """Eight processes begin, finish and read the same file again and again."""
    path = tmp_path / "cache.db"
    pids = []
    for number in range(8):
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for _ in range(40):
                    try:
                        _write_or_read(path, number)
                    except CacheError as error:
                        # Another has deleted it while it was opened, and a third has made it again.
                        if not any(text in str(error) for text in ("unable to open database", "No such file")):
                            raise
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0] * 8
    assert set(names(tmp_path)) <= {"cache.db"}


def _write_or_read(path: Path, number: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        reader = open_samples(path)
        if reader is not None:
            with reader:
                rows = list(reader.rows())
            assert len(rows) == 30
            assert len(set(rows)) == 1
            path.unlink()
            return
    writer = begin_samples(path)
    if writer is not None:
        for _ in range(30):
            writer.append(bytes([number]) * 30_000)
        writer.finish(ended=True, pickles=False)


def test_foreign_part_is_left_as_it_is_when_it_has_a_second_name(tmp_path: Path) -> None:
    """As in a backup of hard links."""
    own, part = tmp_path / "mine.txt", tmp_path / f"c.samples{PART}"
    own.write_bytes(b"precious")
    os.link(own, part)
    with pytest.raises(CacheError, match="left as it is"):
        begin_samples(tmp_path / "c.samples")
    assert part.read_bytes() == b"precious"


@pytest.mark.parametrize("fact", [("samples", "x"), ("shares", "q"), ("ended", None), ("more", 1)])
def test_file_is_damaged_when_its_facts_are_of_another_kind(fact: tuple[str, Any], tmp_path: Path) -> None:
    """Even if their checksum is right."""
    path = tmp_path / "c.samples"
    write(path)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        facts = dict(connection.execute("SELECT name, value FROM facts WHERE name != 'crc'")) | dict([fact])
        crc = sample_file._checksum([(name, facts[name]) for name in sample_file.SampleFacts._fields])
        connection.execute("DELETE FROM facts")
        connection.executemany("INSERT INTO facts VALUES (?, ?)", [*facts.items(), ("crc", crc)])
        connection.commit()
    with pytest.raises(CacheError, match="does not say how many samples"):
        open_samples(path)
