"""Actions after the import of a module: once, in time for the code that imports it, without a trace in the module."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchdata_wds.post_import import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``awaited`` with a module ``late``, which nothing has imported."""
    (tmp_path / "awaited").mkdir()
    (tmp_path / "awaited" / "__init__.py").write_text("")
    (tmp_path / "awaited" / "late.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield tmp_path / "awaited"
    assert sys.meta_path == before, "a finder is left over"
    for name in [name for name in sys.modules if name.partition(".")[0] == "awaited"]:
        del sys.modules[name]


def test_action_runs_once_when_the_module_is_imported_later(package: Path) -> None:
    """After the module's own code, and before the import returns; the module has its own loader."""
    seen: list[int] = []
    when_imported("awaited.late", lambda: seen.append(sys.modules["awaited.late"].VALUE))
    assert seen == []
    importlib.import_module("awaited")
    assert seen == []
    late = importlib.import_module("awaited.late")
    assert seen == [1]
    assert late.__spec__ is not None
    assert type(late.__loader__) is type(late.__spec__.loader) is type(sys.modules["awaited"].__loader__)
    importlib.reload(late)
    assert seen == [1]


def test_action_runs_at_once_when_the_module_is_there(package: Path) -> None:
    """Nothing is left waiting."""
    importlib.import_module("awaited.late")
    seen: list[int] = []
    when_imported("awaited.late", lambda: seen.append(2))
    assert seen == [2]


def test_action_imports_the_module_when_its_package_is_there(package: Path) -> None:
    """Another thread may be in the middle of it."""
    importlib.import_module("awaited")
    seen: list[int] = []
    when_imported("awaited.late", lambda: seen.append(sys.modules["awaited.late"].VALUE))
    assert seen == [1]


def test_action_waits_on_when_an_import_fails(package: Path) -> None:
    """The next import may succeed."""
    (package / "late.py").write_text("raise ImportError('not yet')")
    seen: list[int] = []
    when_imported("awaited.late", lambda: seen.append(3))
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("awaited.late")
    assert seen == []
    (package / "late.py").write_text("VALUE = 12345")
    importlib.invalidate_caches()
    importlib.import_module("awaited.late")
    assert seen == [3]


def test_action_that_fails_fails_the_import(package: Path) -> None:
    """As if the module itself had failed, and again at the next try."""

    def fail() -> None:
        raise RuntimeError("taken")

    when_imported("awaited.late", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="taken"):
            importlib.import_module("awaited.late")
        assert "awaited.late" not in sys.modules
    when_imported("awaited.late", lambda: None)
    importlib.import_module("awaited.late")


def test_last_action_counts_when_there_are_several(package: Path) -> None:
    """A package that is imported again awaits the module anew."""
    seen: list[int] = []
    for number in (1, 2):
        when_imported("awaited.late", lambda number=number: seen.append(number))  # type: ignore[misc]
    importlib.import_module("awaited.late")
    assert seen == [2]


def test_finders_find_the_module_when_nothing_imports_it(package: Path) -> None:
    """Whoever only asks for it sees its source, and can have what its own loader has."""
    seen: list[int] = []
    when_imported("awaited.late", lambda: seen.append(1))
    spec = importlib.util.find_spec("awaited.late")
    assert spec is not None
    assert spec.origin == str(package / "late.py")
    assert spec.loader is not None
    assert spec.loader.get_source("awaited.late") == "VALUE = 1\n"  # type: ignore[attr-defined]
    assert seen == []
    importlib.import_module("awaited.late")
    assert seen == [1]


def test_missing_modules_stay_missing(package: Path) -> None:
    """The error is Python's own."""
    when_imported("awaited.never", lambda: None)
    importlib.import_module("awaited")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'awaited\.never'"):
        importlib.import_module("awaited.never")
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "awaits", "") != "awaited.never"]
