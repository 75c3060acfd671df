"""What holds for every target: a shard appears whole, once, or not at all."""

import gc
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest

from tests.kits.processes import children, in_child, open_files
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import kill_commands, open_target

DATA = os.urandom(2_000_000)


class Store(NamedTuple):
    """A place for shards of one kind."""

    url: str
    read: Callable[[], bytes | None]  # the shard, or None where there is none
    put: Callable[[bytes], object]  # stores a shard by other means
    left: list[str]  # the files that an abort leaves, as far as it has written


@pytest.fixture(params=["local", "memory", "pipe"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A place of each kind; temporary files lie beside the shard."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "x.tar"
    if request.param == "memory":
        memory = fsspec.filesystem("memory")
        memory.store.pop("/targets/x.tar", None)
        url = "memory://targets/x.tar"
        return Store(
            url,
            lambda: memory.cat(url) if memory.exists(url) else None,
            lambda data: memory.pipe("/targets/x.tar", data),
            [],
        )
    url, left = str(path), "x.tar.partial"
    if request.param == "pipe":
        url, left = f"pipe:cat > '{tmp_path}/x.part' && mv '{tmp_path}/x.part' '{path}'", "x.part"
    return Store(url, lambda: path.read_bytes() if path.exists() else None, path.write_bytes, [left])


def files_beside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "x.tar")


def test_target_appears_whole_when_committed(store: Store, tmp_path: Path) -> None:
    """In pieces of any type, or without one; then an abort harms nothing, and a second commit is an error."""
    for pieces in ((), (DATA[:1], bytearray(DATA[1:3000]), memoryview(DATA)[3000:], b"")):
        before = open_files()
        target = open_target(store.url, overwrite=True)
        assert target.url == store.url
        for piece in pieces:
            target.write(piece)
        assert store.read() == (b"" if pieces else None)
        target.commit()
        assert store.read() == b"".join(pieces)
        target.abort()
        with pytest.raises(ShardOpenError, match="committed, aborted, or has failed before; open it again"):
            target.commit()
        assert store.read() == b"".join(pieces)
        assert files_beside(tmp_path) == []
        assert open_files() <= before


@pytest.mark.parametrize("how", ["abort", "drop"])
def test_target_does_not_appear_when_it_is_not_committed(store: Store, tmp_path: Path, how: str) -> None:
    """Aborted or collected, it holds nothing open, and runs nothing; it cannot be used any more."""
    files, processes = open_files(), children(unreaped=True)
    target = open_target(store.url)
    target.write(DATA[:1_500_000])
    if how == "abort":
        target.abort()
        target.abort()
        with pytest.raises(ShardOpenError, match="committed, aborted, or has failed"):
            target.commit()
        with pytest.raises(ShardOpenError, match="committed, aborted, or has failed"):
            target.write(b"")
    del target
    gc.collect()
    time.sleep(0.2)  # in which a command that took the end of its input for that of the shard would store it
    assert open_files() <= files
    assert children(unreaped=True) == processes
    assert store.read() is None
    assert files_beside(tmp_path) == store.left


def test_target_is_the_parents_when_a_child_is_forked(store: Store) -> None:
    """A child can neither write, commit nor abort, and its end harms nothing."""
    target = open_target(store.url)
    target.write(DATA[:100])

    def use_copy() -> None:
        for use in (lambda: target.write(b"child"), target.commit):
            with pytest.raises(ShardOpenError, match=rf"opened in process {os.getppid()}"):
                use()
        target.abort()
        kill_commands()

    assert in_child(use_copy) == 0
    target.write(DATA[100:])
    target.commit()
    assert store.read() == DATA


@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
def test_target_replaces_a_shard_only_on_request(store: Store, tmp_path: Path) -> None:
    """What is there when it is opened, and what appears meanwhile: the first to finish wins, the other's is kept."""
    target = open_target(store.url)
    target.write(DATA)
    store.put(b"other")
    with pytest.raises(ShardOpenError, match=r"meanwhile.*(this one's shard is|kept whole) in") as caught:
        target.commit()
    assert store.read() == b"other"
    (kept,) = files_beside(tmp_path)
    assert kept in str(caught.value)
    assert (tmp_path / kept).read_bytes() == DATA
    with pytest.raises(ShardOpenError, match=r"already exists; pass overwrite=True, .*start_shard='next'") as caught:
        open_target(store.url)
    assert caught.value.shard == store.url
    target = open_target(store.url, overwrite=True)
    target.write(DATA)
    assert store.read() == b"other"
    target.commit()
    assert store.read() == DATA
