"""Where finished shards go: what cannot be written, what a writer asks, and standard output."""

import errno
import gc
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.processes import in_worker
from tests.kits.storage_kit import names
from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage import list_targets, open_target, remove_target
from torchdata_wds.storage.targets import base as writing

DATA = os.urandom(5120)


# ----------------------------------------------------------------------------------------------- what cannot be written
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no/x.tar", r"its folder \S*/no does not exist; make it first"),
        ("file/x.tar", r"\S*/file is not a folder"),
        ("folder", "it is a folder"),
        ("folder/", "names no file"),
        ("fifo", "not a regular file"),
        ("dangling", "already exists"),
        ("x\0y", "null"),
        ("x" * 300, "give it a shorter one"),
    ],
)
def test_open_target_raises_when_the_name_cannot_be_written(tmp_path: Path, name: str, said: str) -> None:
    """What can be seen before the first byte is said before the first byte."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ShardOpenError, match=said) as caught:
        open_target(f"{tmp_path}/{name}")
    assert caught.value.shard == f"{tmp_path}/{name}"


def test_open_target_replaces_no_device_when_told_to_overwrite() -> None:
    """Not even root loses its /dev/null."""
    with pytest.raises(ShardOpenError, match="not a regular file"):
        open_target("/dev/null", overwrite=True)


def test_open_target_raises_when_the_folder_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without permission is named."""
    tmp_path.chmod(0o555)

    monkeypatch.chdir(tmp_path)  # whose parents another user may not pass
    try:
        if not os.getuid():
            os.seteuid(65534)
        with pytest.raises(ShardOpenError, match=r"no permission to write in the folder|Permission denied"):
            open_target("x.tar")
    finally:
        if not os.getuid():
            os.seteuid(0)
        tmp_path.chmod(0o755)


def test_open_target_raises_when_the_working_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path means nothing any more."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ShardOpenError, match="working directory is gone"):
        open_target("x.tar")


@pytest.mark.parametrize("url", ["http://host/x.tar", "https://me:pw@host/x.tar?sig=abc"])
def test_open_target_refuses_web_servers(url: str) -> None:
    """A web server is read only; the message shows the ways out and no secret."""
    for use in (open_target, remove_target, list_targets):
        with pytest.raises(ShardOpenError, match="pipe:curl") as caught:
            use(url)  # type: ignore[operator]
        assert "pw@" not in str(caught.value)
        assert "abc" not in str(caught.value)


def test_open_target_raises_when_what_it_gets_is_wrong() -> None:
    """No URL, options that are none, another machine's file."""
    with pytest.raises(TypeError, match="not int"):
        open_target(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="storage_options"):
        open_target("x.tar", storage_options={"s3": 1})  # type: ignore[dict-item]
    with pytest.raises(ShardOpenError, match="not of host"):
        open_target("file://host/x.tar")
    with pytest.raises(ShardOpenError, match="names no file"):
        open_target("")


def test_target_errors_survive_pickling(tmp_path: Path) -> None:
    """A worker process can send its error home."""
    with pytest.raises(ShardOpenError) as caught:
        open_target(tmp_path / "no" / "x.tar")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.shard) == (str(caught.value), str(tmp_path / "no" / "x.tar"))


# ------------------------------------------------------------------------------------------------- what a writer asks
def test_target_questions_are_answered_for_local_files(tmp_path: Path) -> None:
    """Shards are listed by name and removed; what is not there is no error."""
    (tmp_path / "folder").mkdir()
    for name in ("b.tar", "a.tar", "c.tar.partial"):
        (tmp_path / name).touch()
    assert list_targets(tmp_path) == ["a.tar", "b.tar", "c.tar.partial"]
    assert list_targets(f"file://{tmp_path}/") == ["a.tar", "b.tar", "c.tar.partial"]
    assert list_targets(tmp_path / "no") == []
    remove_target(tmp_path / "a.tar")
    remove_target(tmp_path / "a.tar")
    assert names(tmp_path) == ["b.tar", "c.tar.partial", "folder"]
    with pytest.raises(ShardOpenError, match="cannot remove"):
        remove_target(tmp_path / "folder")
    with pytest.raises(ShardOpenError, match="cannot list"):
        list_targets(tmp_path / "b.tar")


def test_list_targets_lists_the_working_directory_when_the_folder_is_empty_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a bare file name is ""."""
    (tmp_path / "a.tar").touch()
    monkeypatch.chdir(tmp_path)
    assert list_targets("") == ["a.tar"]


@pytest.mark.parametrize("url", ["-", "pipe:cat"])
def test_target_questions_have_no_answer_when_there_are_no_names(url: str) -> None:
    """Standard output and commands have no shards that exist."""
    assert list_targets(url) == []
    remove_target(url)


# --------------------------------------------------------------------------------------------------- standard output
class Output:
    """What stands for standard output, with a raw stream below."""

    def __init__(self, failure: OSError | None = None) -> None:
        self.buffer = self
        self.data = b""
        self.failure = failure
        self.flushes = 0

    def write(self, data: memoryview) -> int:
        if self.failure:
            raise self.failure
        self.data += bytes(data[:1000])
        return min(len(data), 1000)

    def flush(self) -> None:
        self.flushes += 1


def test_standard_output_gets_the_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is written though the stream writes short, and flushed; what was printed before comes first."""
    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    target = open_target("-")
    assert output.flushes == 1
    target.write(DATA)
    assert output.data == DATA
    target.commit()
    assert output.flushes == 2
    target = open_target("-")
    target.abort()
    assert output.flushes == 3


def test_standard_output_raises_a_broken_pipe_as_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads us went away: the program ends as any other; a full disk is a shard's error."""
    monkeypatch.setattr(sys, "stdout", Output(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    with pytest.raises(BrokenPipeError) as caught:
        open_target("-").write(DATA)
    assert not isinstance(caught.value, ShardOpenError)
    monkeypatch.setattr(sys, "stdout", Output(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(ShardOpenError, match=r"'-'.*byte 0: No space"):
        open_target("-").write(DATA)


def test_open_target_raises_when_there_is_no_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without standard output says so, and so does one whose output is text only."""
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(ShardOpenError, match="has none"):
            open_target("-")


def _open_standard_output() -> str:
    with pytest.raises(ShardOpenError) as caught:
        open_target("-")
    return str(caught.value)


def test_open_target_raises_when_standard_output_is_written_in_a_worker() -> None:
    """Worker processes would mix their shards, and the error says what to do."""
    assert "num_workers=0" in in_worker(_open_standard_output)


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_standard_output_is_a_shard_when_it_is_a_pipe(unbuffered: list[str]) -> None:
    """A program's output is the shard and nothing else, though that be 3 MB at once."""
    code = (
        "from torchdata_wds.storage import open_target\n"
        "target = open_target('-')\ntarget.write(bytes(3_000_000))\ntarget.commit()"
    )
    done = subprocess.run([sys.executable, *unbuffered, "-c", code], capture_output=True, check=True, timeout=120)
    assert done.stdout == bytes(3_000_000)
    assert done.stderr == b""


def test_targets_are_collected_when_dropped(tmp_path: Path) -> None:
    """Nothing keeps an unfinished target alive."""
    gc.collect()
    before = len(writing._unfinished)
    targets = [open_target(tmp_path / f"{number}.tar") for number in range(10)]
    assert len(writing._unfinished) == before + 10
    targets.clear()
    gc.collect()
    assert len(writing._unfinished) == before
