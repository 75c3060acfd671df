"""What the package shows to the outside, and which floor may import which."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import torchdata_wds
from torchdata_wds import errors, handlers
from torchdata_wds.pipes.base import functional_forms

ROOT = Path(torchdata_wds.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(
    [info.name for info in pkgutil.walk_packages([str(ROOT)], "torchdata_wds.") if not info.name.endswith("__main__")]
)

#: Each floor, and what of the package it may import besides itself.
GROUND = {"errors", "handlers", "environment", "program_interrupts"}
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "environment": set(),
    "program_interrupts": set(),
    "handlers": {"errors"},
    "storage": GROUND,
    "format": GROUND | {"storage"},
    "codecs": GROUND | {"storage", "format"},
    "pipes": GROUND | {"storage", "format", "codecs"},
    "workers": GROUND | {"storage", "format", "codecs", "pipes"},
    "tools": GROUND | {"storage", "format", "codecs", "pipes", "workers", ""},
    "__main__": {"tools"},
    "": GROUND | {"storage", "format", "codecs", "pipes", "workers"},
}
WITHOUT_TORCH = {"errors", "environment", "handlers", "storage", "format"}


def floor_of(path: Path) -> str:
    """The folder or module right under the package; "" is the package's own __init__."""
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if part == "__init__" else part


def tree_of(path: Path) -> ast.Module:
    """A file, parsed."""
    return ast.parse(path.read_text(), str(path))


def imports_of(path: Path) -> Iterator[str]:
    """The full name of everything that a file imports anywhere, inside functions too."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """The source of a name such as os.environ."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def public_names() -> set[str]:
    """The names without underscore in the package that are its own, not modules."""
    return {
        name
        for name, value in vars(torchdata_wds).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and str(getattr(value, "__module__", "")).startswith("torchdata_wds")
    }


# ------------------------------------------------------------------------------------------------- the public names


def test_all_is_exact() -> None:
    """Every name in __all__ exists, once, and every public name is in it."""
    assert len(set(torchdata_wds.__all__)) == len(torchdata_wds.__all__)
    for name in torchdata_wds.__all__:
        assert getattr(torchdata_wds, name) is not None
    assert public_names() | {"StatefulPipeline", "WorkersReadingService"} == set(torchdata_wds.__all__)


def test_all_holds_every_pipe_exception_and_handler() -> None:
    """Nothing that a user needs is reachable only by a longer path."""
    shown = {getattr(torchdata_wds, name) for name in torchdata_wds.__all__}
    assert set(functional_forms.values()) <= shown
    assert set(errors.__all__) <= set(torchdata_wds.__all__)
    five = {"reraise_exception", "ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"}
    assert five <= set(torchdata_wds.__all__)
    assert five <= set(handlers.__all__)


def test_pipes_are_exported_under_their_short_names() -> None:
    """ShardLister is ShardListerIterDataPipe."""
    for cls in functional_forms.values():
        assert getattr(torchdata_wds, cls.__name__.removesuffix("IterDataPipe")) is cls


@pytest.mark.parametrize("name", torchdata_wds.__all__)
def test_public_names_have_a_docstring(name: str) -> None:
    """It is the object's own, not one that it inherits."""
    value = getattr(torchdata_wds, name)
    text = value.__doc__
    assert text, name
    assert text.strip().splitlines()[0].rstrip().endswith((".", ":"))
    if inspect.isclass(value):
        assert text not in [base.__doc__ for base in value.__mro__[1:]]


def test_package_says_so_when_a_name_is_unknown() -> None:
    """The lazy lookup does not hide misspelled names."""
    with pytest.raises(AttributeError, match="no attribute 'WorkerReadingService'"):
        torchdata_wds.WorkerReadingService  # noqa: B018


@pytest.mark.slow
def test_import_is_silent_and_leaves_torchdata_alone() -> None:
    """Under -W error the import prints nothing; torchdata comes with WorkersReadingService, without its banner."""
    script = (
        "import sys, torchdata_wds\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'torchdata']\n"
        "from torchdata_wds import *\n"
        "assert WorkersReadingService.__module__ == 'torchdata_wds.workers.service'\n"
        "import torchdata.dataloader2, torchdata.datapipes.iter\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ----------------------------------------------------------------------------------------------------- the four floors


def test_floors_are_all_known() -> None:
    """A new folder needs a row in FLOORS."""
    assert {floor_of(path) for path in FILES} == set(FLOORS)


def test_imports_point_down() -> None:
    """A floor imports itself and what lies below; only the tools may use the package's own names."""
    for path in FILES:
        here = floor_of(path)
        for name in imports_of(path):
            package, *parts = name.split(".")
            if package != "torchdata_wds":
                continue
            there = parts[0] if parts[0] in FLOORS else ""
            assert there == here or there in FLOORS[here], f"{path.relative_to(ROOT)} imports {name}"


def test_torch_is_imported_only_where_it_may_be() -> None:
    """The lower floors need no torch, and torchdata is imported in one file."""
    for path in FILES:
        roots = {name.split(".")[0] for name in imports_of(path)}
        if floor_of(path) in WITHOUT_TORCH:
            assert not roots & {"torch", "torchdata"}, path
        if path != ROOT / "workers" / "service.py":
            assert "torchdata" not in roots, path


def test_torch_is_imported_by_codecs_only_when_needed() -> None:
    """Codecs import torch inside functions."""
    for path in (ROOT / "codecs").glob("*.py"):
        for node in tree_of(path).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], path


def test_only_tools_print_and_only_environment_reads_the_environment() -> None:
    """Everything else logs, and every variable is listed in environment.py."""
    for path in FILES:
        nodes = list(ast.walk(tree_of(path)))
        if floor_of(path) != "tools":
            calls = [dotted(node.func) for node in nodes if isinstance(node, ast.Call)]
            assert not {"print", "sys.stdout.write", "sys.stderr.write"} & set(calls), path
        if floor_of(path) != "environment":
            names = {dotted(node) for node in nodes} | set(imports_of(path))
            assert not {"os.environ", "os.environb", "os.getenv", "os.putenv"} & names, path


def test_files_have_names_that_say_something() -> None:
    """No file is a place for leftovers."""
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [path for path in ROOT.rglob("*") if path.stem in vague]


# ------------------------------------------------------------------------------------------------ docstring examples


def examples() -> list[tuple[str, Any]]:
    """Every docstring of the package that has an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name))]
    return [(test.name, test) for test in found if test.examples]


@pytest.mark.parametrize("test", [pytest.param(test, id=name) for name, test in examples()])
def test_docstring_examples_run(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are true, offline, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert result.failed == 0, "".join(output)


def test_docstring_examples_have_prompts() -> None:
    """An Example section without >>> would never be run."""
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                _, marker, example = (ast.get_docstring(node) or "").partition("\nExample:\n")
                assert not marker or ">>> " in example, f"{path}: {getattr(node, 'name', '')}"
