"""Shards to every other store: collected, uploaded whole, and never lost."""

import errno
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from tests.kits.storage_kit import read, write
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import list_targets, open_target, remove_target
from torchdata_wds.storage import retrying as patience

DATA = os.urandom(100_000)


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A store that fails as it is told."""

    protocol = "flaky"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    failures: ClassVar[list[Exception]] = []
    puts = 0
    lost = 0
    made: ClassVar[list[dict[str, Any]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].lstrip("/") if "://" in path else path

    def __init__(self, *args: Any, **options: Any) -> None:
        type(self).made.append(options)
        super().__init__(*args, **options)

    def put_file(self, lpath: str, rpath: str, *args: Any, **options: Any) -> None:
        type(self).puts += 1
        if self.failures:
            raise self.failures.pop(0)
        super().put_file(lpath, rpath, *args, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = super().info(path, **options)
        return {**found, "size": found["size"] - self.lost}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone; nobody waits between attempts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(patience, "seconds_to_wait", lambda failures, asked=0.0: 0.0)
    return folder


@pytest.fixture(autouse=True)
def flaky() -> Iterator[type[Flaky]]:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures, Flaky.puts, Flaky.lost, Flaky.made = [], 0, 0, []
    yield Flaky
    for kind in (Flaky, MemoryFileSystem):
        kind.store.clear()
        kind.pseudo_dirs[:] = [""]


def test_remote_target_appears_whole_when_committed(temporary: Path) -> None:
    """The store has nothing before the commit, and the shard after it, in a folder that is made for it."""
    target = open_target("memory://new/folder/x.tar")
    assert not list(temporary.iterdir())
    target.write(DATA[:70_000])
    target.write(memoryview(DATA)[70_000:])
    (spooled,) = temporary.iterdir()
    assert spooled.read_bytes() == DATA
    assert spooled.name.endswith("-x.tar")
    assert list_targets("memory://new/folder") == []
    target.commit()
    assert read("memory://new/folder/x.tar") == DATA
    assert not list(temporary.iterdir())


def test_remote_target_makes_folders_when_the_store_has_them(tmp_path: Path) -> None:
    """The local filesystem of fsspec needs the folder first."""
    write(f"local://{tmp_path}/new/folder/x.tar", DATA)
    assert (tmp_path / "new" / "folder" / "x.tar").read_bytes() == DATA


def test_remote_target_gives_the_store_its_options(flaky: type[Flaky]) -> None:
    """Options arrive, and those of other stores do not."""
    write("flaky://b/x.tar", DATA, storage_options={"flaky": {"secret": "s"}, "s3": {"key": "k"}})
    assert flaky.made == [{"secret": "s"}]
    assert read("flaky://b/x.tar") == DATA


# ------------------------------------------------------------------------------------------------------------- uploads
def test_remote_target_tries_again_when_the_upload_fails(
    flaky: type[Flaky], temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two failures are told of without secrets, and the third attempt stores the shard."""
    caplog.set_level(logging.INFO)
    flaky.failures = [TimeoutError("slow"), RuntimeError("https://host/?X-Amz-Signature=abc")]
    write("flaky://b/x.tar", DATA)
    assert read("flaky://b/x.tar") == DATA
    assert flaky.puts == 3
    assert not list(temporary.iterdir())
    assert [record.args[3] for record in caplog.records if isinstance(record.args, tuple)] == [4, 4]
    assert "x.tar: uploading it failed: TimeoutError: slow; attempt 1 of 4 follows" in caplog.text
    assert "abc" not in caplog.text


def test_remote_target_keeps_the_file_when_each_upload_fails(flaky: type[Flaky], temporary: Path) -> None:
    """After five failures the error names the file that still has everything, and masks secrets."""
    flaky.failures = [OSError("no route, token=abc")] * 9
    target = open_target("flaky://b/x.tar")
    target.write(DATA)
    with pytest.raises(ShardOpenError, match="could not be uploaded: OSError: no route") as caught:
        target.commit()
    target.abort()
    (kept,) = temporary.iterdir()
    assert str(kept) in str(caught.value)
    assert "abc" not in str(caught.value)
    assert caught.value.shard == "flaky://b/x.tar"
    assert kept.read_bytes() == DATA
    assert flaky.puts == 5
    del target
    assert kept.exists()


@pytest.mark.parametrize(
    "failure", [PermissionError("no"), FileNotFoundError("no bucket"), ImportError("no package"), TypeError("no")]
)
def test_remote_target_tries_once_when_it_is_hopeless(failure: Exception, flaky: type[Flaky], temporary: Path) -> None:
    """What no second attempt will change fails at once; the file is kept all the same."""
    flaky.failures = [failure]
    with pytest.raises(ShardOpenError, match=f"{type(failure).__name__}: no"):
        write("flaky://b/x.tar", DATA)
    assert flaky.puts == 1
    assert len(list(temporary.iterdir())) == 1


def test_remote_target_raises_when_the_store_has_another_size(flaky: type[Flaky], temporary: Path) -> None:
    """An upload that the store has cut is a failure."""
    flaky.lost = 1
    with pytest.raises(ShardOpenError, match="expected 100,000 bytes in the store after the upload, found 99,999"):
        write("flaky://b/x.tar", DATA)
    assert flaky.puts == 5
    assert len(list(temporary.iterdir())) == 1
    assert not list_targets("flaky://b")  # half a shard would pass for a whole one


def test_remote_target_keeps_the_file_when_the_upload_is_interrupted(
    flaky: type[Flaky], temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C loses nothing: the log names the file, whose name has no query in it."""
    flaky.failures = [KeyboardInterrupt()]  # type: ignore[list-item]
    with pytest.raises(KeyboardInterrupt):
        write("flaky://b/x.tar?signature=secret", DATA)
    (file,) = temporary.iterdir()
    assert file.read_bytes() == DATA
    assert str(file) in caplog.text
    assert "secret" not in file.name


@pytest.mark.parametrize(("answer", "stored"), [(PermissionError, True), (FileNotFoundError, False)])
def test_remote_target_looks_after_the_upload(
    answer: type[Exception], stored: bool, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write but not look has written; what is not there after the upload is a failure."""

    def info(self: Flaky, path: str, **options: Any) -> dict[str, Any]:
        raise answer("no")

    monkeypatch.setattr(flaky, "info", info)
    target = open_target("flaky://b/x.tar", overwrite=True)
    target.write(DATA)
    if stored:
        target.commit()
    else:
        with pytest.raises(ShardOpenError, match="not there after the upload"):
            target.commit()


# ---------------------------------------------------------------------------------------------------------- refusals
def test_open_target_raises_when_the_store_does_not_say(flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot ask whether a shard exists may overwrite without asking."""

    def exists(self: Flaky, path: str) -> bool:
        raise PermissionError("Forbidden token=abc")

    monkeypatch.setattr(flaky, "exists", exists)
    with pytest.raises(ShardOpenError, match=r"Forbidden token=\*\*\*; overwrite=True does not ask"):
        open_target("flaky://b/x.tar")
    write("flaky://b/x.tar", DATA, overwrite=True)
    assert flaky.puts == 1


def test_open_target_lists_the_known_when_the_scheme_is_unknown() -> None:
    """The message is that of reading."""
    with pytest.raises(ShardOpenError, match=r"unknown scheme s4; known are .*memory.*, s3, "):
        open_target("s4://bucket/x.tar")


def test_open_target_names_the_extra_when_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is that of reading."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(_registry, "gs", raising=False)
    with pytest.raises(ShardOpenError, match=r"pip install 'torchdata_wds\[gcs\]'"):
        open_target("gs://bucket/x.tar")


def test_remote_target_raises_when_the_temporary_folder_is_full(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names shard, byte, file and the variable that helps; nothing is left there."""
    real = os.write

    def write_little(file: int, data: memoryview) -> int:
        if os.fstat(file).st_size >= 3000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data[:1000])

    target = open_target("memory://x.tar")
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_little)
        with pytest.raises(ShardOpenError, match=r"x\.tar cannot be written at byte 3,000: No space.*TMPDIR") as caught:
            target.write(DATA)
    assert str(temporary) in str(caught.value)
    assert not list(temporary.iterdir())
    with pytest.raises(ShardOpenError, match="has failed"):
        target.commit()


def test_remote_target_raises_when_there_is_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files that does not exist is named by its variable."""
    monkeypatch.setattr(tempfile, "tempdir", "/no/such/folder")
    with pytest.raises(ShardOpenError, match=r"no temporary file can be made: No such file.*TMPDIR"):
        open_target("memory://x.tar").write(DATA)


# ------------------------------------------------------------------------------------------------- what a writer asks
def test_target_questions_are_answered_for_stores() -> None:
    """Shards are listed by name and removed; what is not there is no error."""
    fsspec.filesystem("memory").pipe({"/shards/b.tar": DATA, "/shards/a.tar": DATA, "/shards/in/c.tar": DATA})
    assert list_targets("memory://shards") == list_targets("memory://shards/") == ["a.tar", "b.tar"]
    assert list_targets("memory://no") == []
    remove_target("memory://shards/a.tar")
    remove_target("memory://shards/a.tar")
    assert list_targets("memory://shards") == ["b.tar"]


@pytest.mark.parametrize(("use", "method"), [(remove_target, "rm_file"), (list_targets, "ls")])
def test_target_questions_raise_when_the_store_refuses(
    use: Any, method: str, flaky: type[Flaky], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own words are passed on without secrets."""

    def refuse(*args: Any, **options: Any) -> None:
        raise PermissionError("Forbidden token=abc")

    monkeypatch.setattr(flaky, method, refuse)
    with pytest.raises(
        ShardOpenError, match=r"cannot (remove|list) flaky://b: PermissionError: Forbidden token=\*\*\*"
    ):
        use("flaky://b")
