"""What the package shows to the outside."""

import ast
import doctest
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchdata_wds
from tests.kits.forms import functional_forms
from tests.kits.torchdata import is_installed, needs_torchdata, uses_torchdata
from torchdata_wds import errors, handlers

ROOT = Path(torchdata_wds.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(
    [info.name for info in pkgutil.walk_packages([str(ROOT)], "torchdata_wds.") if not info.name.endswith("__main__")]
)
SERVICES = {"WorkersReadingService", "RayReadingService"}  # they need torchdata
NAMES = [name for name in torchdata_wds.__all__ if is_installed() or name not in SERVICES]


def declared_names() -> dict[str, str]:
    """The public names that type checkers see, with the modules from which they are imported."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


# ------------------------------------------------------------------------------------------------- the public names
def test_all_is_exact() -> None:
    """Every name in __all__ exists, once, is what type checkers see, and there are no other public names."""
    assert len(set(torchdata_wds.__all__)) == len(torchdata_wds.__all__)
    # without torchdata, the services are left out, since `import *` would fail
    assert set(declared_names()) == set(torchdata_wds._HOMES) == set(torchdata_wds.__all__) | SERVICES
    for name in NAMES:
        module, _, own_name = declared_names()[name].partition(":")
        assert getattr(torchdata_wds, name) is getattr(importlib.import_module(module), own_name)


def test_dir_shows_the_public_names() -> None:
    """Also those that nothing has used."""
    assert set(torchdata_wds.__all__) <= set(dir(torchdata_wds))


#: Public names for programs that only write shards, or look at them.
WITHOUT_TORCH = """
    TarWriter ShardWriter ShardInfo ShardIndex DatasetIndex index_shard dali_index wids_index ShardMember ShardSlice
    CachedShard TextSegment ImageSegment interleaved_sample handle_extension image_decoder torch_video torch_audio
    warn_and_continue WdsError
"""

WRITING = """
import sys, torchdata_wds
for name in sys.argv[1:]:
    getattr(torchdata_wds, name)
with torchdata_wds.ShardWriter("x-%06d.tar", index=True) as writer:
    writer.write({"__key__": "a", "cls": 1, "txt": "text", "json": [1]})
torchdata_wds.index_shard("x-000000.tar")
sys.exit("torch" in sys.modules)
"""


def test_names_for_writing_need_no_torch(tmp_path: Path) -> None:
    """The writers neither: they ask it for their place among workers and ranks only if it has been imported."""
    command = [sys.executable, "-c", WRITING, *WITHOUT_TORCH.split()]
    assert subprocess.run(command, cwd=tmp_path, check=False, timeout=120).returncode == 0


def test_packages_are_attributes() -> None:
    """As in a package that imports all of its modules."""
    code = "import torchdata_wds; assert torchdata_wds.storage.mask_url('x.tar') == 'x.tar'"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


def test_all_holds_every_pipe_exception_and_handler() -> None:
    """Nothing that a user needs is reachable only by a longer path."""
    shown = {getattr(torchdata_wds, name) for name in NAMES}
    assert set(functional_forms.values()) <= shown
    assert set(errors.__all__) <= set(torchdata_wds.__all__)
    five = {"reraise_exception", "ignore_and_continue", "ignore_and_stop", "warn_and_continue", "warn_and_stop"}
    assert five <= set(torchdata_wds.__all__)
    assert five <= set(vars(handlers))


def test_pipes_are_exported_under_their_short_names() -> None:
    """ShardLister is ShardListerIterDataPipe."""
    for cls in functional_forms.values():
        assert getattr(torchdata_wds, cls.__name__.removesuffix("IterDataPipe")) is cls


@pytest.mark.parametrize("name", NAMES)
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


@needs_torchdata
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


# ------------------------------------------------------------------------------------------------ docstring examples
def examples() -> list[Any]:
    """Every docstring of the package that has an example."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    names = [name for name in MODULES if is_installed() or not name.endswith("service")]
    if importlib.util.find_spec("ray") is None:
        names = [name for name in names if not name.startswith("torchdata_wds.workers.ray.")]
    found = [test for name in names for test in finder.find(importlib.import_module(name)) if test.examples]
    return [pytest.param(test, id=test.name, marks=[needs_torchdata] * needs_it(test)) for test in found]


def needs_it(test: doctest.DocTest) -> bool:
    return uses_torchdata(ast.parse("".join(example.source for example in test.examples)))


@pytest.mark.parametrize("test", examples())
def test_docstring_examples_run(test: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples are true, offline, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert result.failed == 0, "".join(output)


def test_docstring_examples_have_prompts() -> None:
    """An Example section without >>> would never be run."""
    for path in FILES:
        text = path.read_text()
        for node in definitions(ast.parse(text)) if "Example:\n" in text else ():
            _, marker, example = (ast.get_docstring(node) or "").partition("\nExample:\n")
            assert not marker or ">>> " in example, f"{path}: {getattr(node, 'name', '')}"


def definitions(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """What can have a docstring, in a module or anywhere in its statements."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from definitions(child)
