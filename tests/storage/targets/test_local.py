"""Shards to local files: beside their name, and then under it, whole; one writer at a time."""

import errno
import fcntl
import os
import resource
import signal
from pathlib import Path

import pytest

from tests.kits.processes import in_child, open_files
from tests.kits.storage_kit import names, read, write
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import open_target

DATA = os.urandom(5120)


# ------------------------------------------------------------------------------------------------------------- finished
@pytest.mark.parametrize("kind", ["path", "text", "file URL"])
def test_local_target_appears_whole_when_committed(tmp_path: Path, kind: str) -> None:
    """Until the commit only the .partial is there, after it only the shard."""
    path = tmp_path / "a b.tar"
    target = open_target({"path": path, "text": str(path), "file URL": f"file://{tmp_path}/a%20b.tar"}[kind])
    assert names(tmp_path) == []
    for piece in (DATA[:1], bytearray(DATA[1:3000]), memoryview(DATA)[3000:], b""):
        target.write(piece)
    assert names(tmp_path) == ["a b.tar.partial"]
    target.commit()
    assert names(tmp_path) == ["a b.tar"]
    assert read(path) == DATA


def test_local_target_writes_a_relative_path_where_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the working directory moves no shard."""
    monkeypatch.chdir(tmp_path)
    target = open_target("x.tar")
    assert target.url == "x.tar"
    monkeypatch.chdir("/")
    target.write(DATA)
    target.commit()
    assert names(tmp_path) == ["x.tar"]


def test_local_target_heeds_the_umask(tmp_path: Path) -> None:
    """The shard has the mode of any new file."""
    before = os.umask(0o027)
    try:
        write(tmp_path / "x.tar", DATA)
    finally:
        os.umask(before)
    assert (tmp_path / "x.tar").stat().st_mode & 0o777 == 0o640


def test_local_target_writes_all_when_the_system_writes_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system did not take is given to it again; items larger than a byte count as bytes."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:100]))
    write(tmp_path / "x.tar", DATA[:1024], memoryview(DATA[1024:]).cast("I"))  # type: ignore[arg-type]
    assert (tmp_path / "x.tar").read_bytes() == DATA


def test_local_target_syncs_before_and_after_it_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are durable before the name, and the name before commit returns."""
    calls: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        calls.append(",".join(names(tmp_path)))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "x.tar", DATA)
    assert calls == ["x.tar.partial", "x.tar"]


def test_local_target_goes_on_when_the_file_system_cannot_sync_lock_or_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that lacks them all still gets its shards, and replaces none."""

    def lacking(*args: object, **options: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "fsync", lacking)
    monkeypatch.setattr(os, "link", lacking)
    monkeypatch.setattr(fcntl, "flock", lacking)
    write(tmp_path / "x.tar", DATA)
    assert read(tmp_path / "x.tar") == DATA
    late = open_target(tmp_path / "y.tar")
    late.write(b"late")
    (tmp_path / "y.tar").write_bytes(b"early")
    with pytest.raises(ShardOpenError, match="meanwhile"):
        late.commit()
    assert (tmp_path / "y.tar").read_bytes() == b"early"


def test_local_target_raises_when_syncing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that says so only at the end keeps the shard from appearing."""

    def failing(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    target = open_target(tmp_path / "x.tar")
    target.write(DATA)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(ShardOpenError, match=r"x\.tar: it cannot be finished: Input/output error"):
            target.commit()
    assert names(tmp_path) == ["x.tar.partial"]


# --------------------------------------------------------------------------------------------------------- not finished
def test_local_target_uses_the_partial_again_when_its_writer_is_dead(tmp_path: Path) -> None:
    """A writer that was killed leaves its .partial; the next one starts it afresh."""

    def die() -> None:
        target = open_target(tmp_path / "x.tar")
        target.write(DATA * 2)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die) == -signal.SIGKILL
    assert names(tmp_path) == ["x.tar.partial"]
    write(tmp_path / "x.tar", DATA)
    assert names(tmp_path) == ["x.tar"]
    assert read(tmp_path / "x.tar") == DATA


def test_local_target_spares_the_shard_when_its_writer_died_while_renaming(tmp_path: Path) -> None:
    """A .partial that is already the finished shard under another name is not emptied."""
    (tmp_path / "x.tar").write_bytes(DATA)
    (tmp_path / "x.tar.partial").hardlink_to(tmp_path / "x.tar")
    target = open_target(tmp_path / "x.tar", overwrite=True)
    target.write(b"new")
    assert (tmp_path / "x.tar").read_bytes() == DATA
    target.commit()
    assert (tmp_path / "x.tar").read_bytes() == b"new"
    assert names(tmp_path) == ["x.tar"]


def test_local_target_follows_no_link_when_the_partial_is_one(tmp_path: Path) -> None:
    """A link in the place of the .partial is an error, and what it points at stays."""
    (tmp_path / "precious").write_bytes(DATA)
    (tmp_path / "x.tar.partial").symlink_to(tmp_path / "precious")
    target = open_target(tmp_path / "x.tar")
    with pytest.raises(ShardOpenError, match=r"x\.tar\.partial: Too many levels of symbolic links"):
        target.write(b"new")
    assert (tmp_path / "precious").read_bytes() == DATA


def fill_disk(path: Path, told: Path) -> None:
    """Writes a shard where a file may have 1,000 bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    target = open_target(path)
    try:
        target.write(DATA)
    except ShardOpenError as error:
        told.mkdir()
        (told / "error").symlink_to(str(error))  # a message in a name, for no file can be written
    try:
        target.commit()
    except ShardOpenError:
        (told / "not committed").mkdir()


def test_local_target_raises_when_the_disk_is_full(tmp_path: Path) -> None:
    """The error names the shard, the byte and the cure; what follows a failed write cannot be committed."""
    told = tmp_path / "told"
    assert in_child(lambda: fill_disk(tmp_path / "x.tar", told)) == 0
    message = str((told / "error").readlink())
    assert "x.tar cannot be written at byte 1,000: File too large" in message
    assert "free some space" in message
    assert names(told) == ["error", "not committed"]
    assert names(tmp_path) == ["told", "x.tar.partial"]


def test_local_target_leaves_no_file_open_when_it_ends_in_any_way(tmp_path: Path) -> None:
    """Commits, aborts, failures and dropped targets leave no descriptor."""
    before = open_files()
    for turn in range(100):
        target = open_target(tmp_path / "x.tar", overwrite=True)
        target.write(DATA)
        if turn % 4 == 0:
            target.commit()
        elif turn % 4 == 1:
            target.abort()
        elif turn % 4 == 2:
            (tmp_path / "x.tar.partial").unlink()
            with pytest.raises(ShardOpenError, match="cannot be finished"):
                target.commit()
        del target
    assert open_files() <= before


# ------------------------------------------------------------------------------------------------------ who else writes
@pytest.mark.parametrize("where", ["this process", "another process"])
def test_local_target_raises_when_another_writer_lives(tmp_path: Path, where: str) -> None:
    """The second writer of a shard is told so and how to avoid it; the first one's shard is whole."""
    first = open_target(tmp_path / "x.tar")
    first.write(DATA)

    def second() -> None:
        with pytest.raises(ShardOpenError, match=r"x\.tar: another writer.*another pattern.*\{rank\} and \{worker\}"):
            write(tmp_path / "x.tar", b"second")

    if where == "this process":
        second()
    else:
        assert in_child(second) == 0
    first.commit()
    assert read(tmp_path / "x.tar") == DATA


def test_local_target_may_be_written_again_when_a_forked_child_still_lives(tmp_path: Path) -> None:
    """An aborted target is unlocked, though a child was forked while it was open."""
    target = open_target(tmp_path / "x.tar")
    target.write(DATA)
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    try:
        target.abort()
        write(tmp_path / "x.tar", b"again")
    finally:
        os.close(writing)
        os.waitpid(pid, 0)
    assert (tmp_path / "x.tar").read_bytes() == b"again"


def test_local_target_looks_again_when_the_partial_was_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening and locking, the other writer finished: its shard is left alone."""
    partial = tmp_path / "x.tar.partial"
    partial.write_bytes(DATA)
    real = fcntl.flock

    def flock(file: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not (tmp_path / "x.tar").exists():
            partial.rename(tmp_path / "x.tar")
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    target = open_target(tmp_path / "x.tar", overwrite=True)
    target.write(b"new")
    assert (tmp_path / "x.tar").read_bytes() == DATA
    target.commit()
    assert (tmp_path / "x.tar").read_bytes() == b"new"
