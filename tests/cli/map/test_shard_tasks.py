"""Functions over shards: outputs are whole or not there, and what fails is named."""

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from torchdata_wds.cli.map import load_function
from torchdata_wds.cli.map.shard_tasks import ShardFunction, error_text, existing_targets, run_task, staged_tasks
from torchdata_wds.format.index.sidecars import index_url, make_index_folder
from torchdata_wds.storage import open_target


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Writes a module that can be imported, and gives its name."""
    names = []
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> str:
        names.append(f"shard_tasks_module_{len(names)}")
        (tmp_path / f"{names[-1]}.py").write_text(text)
        return names[-1]

    yield write
    for name in names:
        sys.modules.pop(name, None)


def run(function: ShardFunction, source: str, target: str | Path, *, overwrite: bool = False) -> str:
    """What is said of one task."""
    with staged_tasks([(source, str(target))], overwrite=overwrite) as (task,):
        return run_task(lambda: function, task)


def files(folder: Path) -> dict[str, bytes]:
    """All files below a folder, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_name(source: str, target: str) -> None:
    Path(target).write_text(f"of {source}")


# ----------------------------------------------------------------------------------------------------------- one task
@pytest.mark.parametrize("prefix", ["", "file:"])
def test_run_task_makes_the_output_appear(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is made; the function sees the input's name as it was given and the suffix of the output."""
    monkeypatch.chdir(tmp_path)
    seen = []

    def function(source: str, target: str) -> str:
        seen.append((source, Path(target).name))
        write_name(source, target)
        assert "x.tar.gz" not in files(tmp_path / "a" / "b")
        return "whatever"

    assert run(function, "s3://b/x.tar?q", f"{prefix}a/b/x.tar.gz") == ""
    assert seen == [("s3://b/x.tar?q", "x.tar.gz")]
    assert files(tmp_path) == {"a/b/x.tar.gz": b"of s3://b/x.tar?q"}
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["x.tar.gz"]


def test_run_task_takes_companions_along(tmp_path: Path) -> None:
    """An index beside the output; scratch files are thrown away."""

    def function(source: str, target: str) -> None:
        write_name(source, target)
        Path(target + ".index").write_text("index")
        for name in ("x.tar.index", "y.tar.index"):
            make_index_folder(index_url(target))
            Path(index_url(target)).with_name(name).write_text("hidden")
        Path(target).with_name("scratch").write_text("")
        Path(target).with_name("x.tarx").write_text("")

    assert run(function, "s", tmp_path / "x.tar") == ""
    assert files(tmp_path) == {"x.tar": b"of s", "x.tar.index": b"index", ".wds-index/x.tar.index": b"hidden"}


def fail(source: str, target: str) -> None:
    write_name(source, target)
    raise ValueError("bad \x1b[31m token=abc")


def leave(source: str, target: str) -> None:
    write_name(source, target)
    sys.exit("left")


def cancel(source: str, target: str) -> None:
    raise asyncio.CancelledError("no Exception")


def close(source: str, target: str) -> None:
    raise GeneratorExit


def make_folder(source: str, target: str) -> None:
    Path(target).mkdir()


def make_link(source: str, target: str) -> None:
    Path(target).symlink_to("/etc/passwd")


def write_other(source: str, target: str) -> None:
    Path(target + ".gz").write_text("")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (fail, "ValueError: bad \\x1b[31m token=***"),
        (leave, "SystemExit: left"),
        (cancel, "CancelledError: no Exception"),
        (close, "GeneratorExit"),
        (
            lambda source, target: None,
            "without writing the file that its second argument names: it wrote nothing there",
        ),
        (make_folder, "it wrote 'x.tar' instead"),
        (make_link, "it wrote 'x.tar' instead"),
        (write_other, "it wrote 'x.tar.gz' instead"),
        (lambda source: None, "TypeError: "),
    ],
)
@pytest.mark.parametrize("exists", [False, True])
def test_run_task_says_what_failed(function: ShardFunction, said: str, exists: bool, tmp_path: Path) -> None:
    """And nothing appears; what was there before stays."""
    before = {"x.tar": b"old"} if exists else {}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    assert said in run(function, "s", tmp_path / "x.tar", overwrite=True)
    assert files(tmp_path) == before
    assert len(list(tmp_path.iterdir())) == len(before)


def test_run_task_passes_ctrl_c_on(tmp_path: Path) -> None:
    """It is no failure of the shard; the half output goes."""

    def function(source: str, target: str) -> None:
        write_name(source, target)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(function, "s", tmp_path / "x.tar")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "overwrite", "said"),
    [
        (Path.mkdir, False, "x.tar' is a folder"),
        (Path.mkdir, True, "x.tar' is a folder"),
        (lambda path: path.symlink_to("nowhere"), False, "x.tar' is a symbolic link that leads nowhere"),
        (Path.touch, False, "was created by another program"),
    ],
)
def test_run_task_calls_no_function_when_its_output_could_not_appear(
    make: Callable[[Path], object], overwrite: bool, said: str, tmp_path: Path
) -> None:
    """Its work would be lost."""
    make(tmp_path / "x.tar")
    assert said in run(lambda *_: pytest.fail("called"), "s", tmp_path / "x.tar", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["x.tar"]  # noqa: PTH208 - names


def test_run_task_removes_an_index_of_the_output_that_it_replaces(tmp_path: Path) -> None:
    """It would lead nowhere; as writers do that overwrite a shard. Other files stay."""
    make_index_folder(index_url(tmp_path / "x.tar"))
    for name in ("x.tar", "x.tar.index", ".wds-index/x.tar.index", "x.tar.md", "y.tar.index"):
        (tmp_path / name).write_text("old")
    assert run(fail, "s", tmp_path / "x.tar", overwrite=True) != ""
    assert len(files(tmp_path)) == 5
    assert run(write_name, "s", tmp_path / "x.tar", overwrite=True) == ""
    assert files(tmp_path) == {"x.tar": b"of s", "x.tar.md": b"old", "y.tar.index": b"old"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_run_task_replaces_an_output_only_when_asked(overwrite: bool, tmp_path: Path) -> None:
    """Also one that was created in the meantime."""
    target = tmp_path / "x.tar"

    def function(source: str, made: str) -> None:
        write_name(source, made)
        target.write_text("other")

    said = run(function, "s", target, overwrite=overwrite)
    assert ("was created by another program" in said) is not overwrite
    assert target.read_text() == ("of s" if overwrite else "other")


def test_run_task_lets_functions_write_to_stores(tmp_path: Path) -> None:
    """They get the URL itself; whether they have written is asked there."""
    url = "memory://shard-tasks/x.tar"

    def function(source: str, target: str) -> None:
        opened = open_target(target)
        opened.write(source.encode())
        opened.commit()

    assert "without writing the file that its second argument names: memory://" in run(lambda *_: None, "s", url)
    assert existing_targets([url]) == set()
    assert run(function, "s", url) == ""
    assert existing_targets([url, "memory://shard-tasks/y.tar", "memory://no/x.tar"]) == {url}


def test_run_task_leaves_a_rewritten_name_to_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule sends it elsewhere, as the package's writers know."""
    monkeypatch.setenv("WDS_REWRITE", f"out/={tmp_path}/")
    assert run(lambda _, target: (tmp_path / target[4:]).write_text(target), "s", "out/x.tar") == ""
    assert files(tmp_path) == {"x.tar": b"out/x.tar"}
    assert existing_targets(["out/x.tar", "out/y.tar"]) == {"out/x.tar"}


def test_existing_targets_finds_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By path and file: URL, in several folders, the working directory too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    for name in ("x.tar", "a b/x.tar", "a b/y.tar.partial"):
        (tmp_path / name).touch()
    there = ["x.tar", "./x.tar", str(tmp_path / "x.tar"), "a b/x.tar", f"file://{tmp_path}/a%20b/x.tar"]
    assert existing_targets([*there, "y.tar", "a b/y.tar", "a b", "no/x.tar"]) == set(there)


def test_staged_tasks_says_when_a_folder_cannot_be_made(tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), staged_tasks([("s", str(tmp_path / "file" / "x.tar"))]):
        pass


# ---------------------------------------------------------------------------------------------------------- functions
def test_load_function_finds_functions(module: Callable[[str], str], tmp_path: Path) -> None:
    """Of any module, in classes too, and in another process by name."""
    name = module("class A:\n    @staticmethod\n    def f(source, target):\n        open(target, 'w').close()\n")
    assert load_function("shutil:copyfile") is shutil.copyfile
    with staged_tasks([("s", str(tmp_path / "x.tar"))]) as (task,):
        assert run_task(partial(load_function, f"{name}:A.f"), task) == ""
    assert (tmp_path / "x.tar").exists()


@pytest.mark.parametrize(
    ("text", "function", "message"),
    [
        ("", "f", "has no function 'f'"),
        ("f = 1", "f", "cannot be called: it is 1"),
        ("def f(): pass", "f.g", "has no function 'f.g'"),
        ("1/0", "f", "fails when it is imported:\n(?s:.*)ZeroDivisionError"),
        ("import sys; sys.exit(3)", "f", "fails when it is imported"),
        ("import no_such_module_x", "f", "fails when it is imported(?s:.*)No module named 'no_such_module_x'"),
        ("x =", "f", "fails when it is imported(?s:.*)SyntaxError"),
    ],
)
def test_load_function_says_what_is_wrong(text: str, function: str, message: str, module: Callable[[str], str]) -> None:
    """An ImportError that names the module."""
    with pytest.raises(ImportError, match=message):
        load_function(f"{module(text)}:{function}")


@pytest.mark.parametrize(("name", "missing"), [("no_such_x:f", "no_such_x"), ("json.no_such_x:f", "json.no_such_x")])
def test_load_function_says_which_module_is_missing(name: str, missing: str) -> None:
    """And where it was looked for."""
    with pytest.raises(ImportError, match=f"no module '{missing}' in the current folder"):
        load_function(name)


def test_error_text_is_the_end_of_the_traceback() -> None:
    """With the place, without what torch adds, and bounded."""
    try:
        raise ValueError("first\n" * 100 + "last\nThis exception is thrown by __iter__ of X(token=1)")
    except ValueError as error:
        lines = error_text(error).splitlines()
    assert lines == ["first"] * 7 + ["last"]


def test_error_text_is_bounded_and_masked_when_a_message_is_long() -> None:
    """A whole array on a line, say."""
    text = error_text(ValueError("token=abc" + "x" * 990 + " token=def " + "y" * 1_000_000))
    assert len(text) == 1000
    assert "abc" not in text
    assert "def" not in text
