"""torchdata's names for the tests. Where torchdata is not installed, the tests that need it are skipped.

A test needs it if it uses a name of this module, or one of torchdata's functional forms, or is marked. What the package
itself does with torchdata is never a reason to skip.

To hide an installed torchdata from the tests and from every process that they start::

    PYTHONPATH=$PWD/tests/kits/without_torchdata pytest
"""

import ast
import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any, NoReturn

import pytest

from torchdata_wds.pipes import form_names
from torchdata_wds.workers import import_torchdata

REASON = "needs torchdata 0.9, which is not installed"
TESTS = Path(__file__).parents[1]

#: Names that other test modules import from here, and their modules.
_HOMES = {
    "DataLoader2": "torchdata.dataloader2",
    "DistributedReadingService": "torchdata.dataloader2",
    "InProcessReadingService": "torchdata.dataloader2",
    "MultiProcessingReadingService": "torchdata.dataloader2",
    "SequentialReadingService": "torchdata.dataloader2",
    "WorkersReadingService": "torchdata_wds.workers.service",
    "RayReadingService": "torchdata_wds.workers.ray.reading_service",
    "StatefulDataLoader": "torchdata.stateful_dataloader",
    "Header": "torchdata.datapipes.iter",
    "LengthSetter": "torchdata.datapipes.iter",
    "MapToIterConverter": "torchdata.datapipes.iter",
    "Repeater": "torchdata.datapipes.iter",
    "SampleMultiplexer": "torchdata.datapipes.iter",
}


def skip_test() -> NoReturn:
    """Skips the test that runs because it needs torchdata."""
    raise pytest.skip.Exception(REASON, _use_item_location=True)  # the summary names the test, not this line


class _Missing:
    """Stands for a name of torchdata, and for what that holds; calling it skips the test that runs."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        skip_test()

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):  # pickle, copy and pytest look for some
            raise AttributeError(name)
        return _Missing()


def is_installed(module: str = "torchdata.dataloader2") -> bool:
    """Whether a module of torchdata can be found; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if error.name != "torchdata":
            raise
        return False


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    if not is_installed(home if home.startswith("torchdata.") else "torchdata.dataloader2"):
        return _Missing()
    if is_installed():
        import_torchdata()  # first, for then torchdata prints no banner
    return getattr(importlib.import_module(home), name)


#: Marks a test whose child processes import torchdata.
needs_torchdata = pytest.mark.skipif(not is_installed(), reason=REASON)


def skip_own_forms(error: AttributeError) -> None:
    """Skips the test that failed because its own code, not the package's, names a form of torchdata."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    callers = [file for file in files if file != form_names.__file__]
    if (
        not is_installed()
        and isinstance(error.__cause__, ImportError)
        and files[-1] == form_names.__file__
        and Path(callers[-1]).is_relative_to(TESTS)
    ):
        skip_test()


def uses_torchdata(program: ast.AST) -> bool:
    """Whether a program imports torchdata or what needs it, or names one of its forms."""
    for node in ast.walk(program):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torchdata":
                return True
            case ast.Import(names=names) if any(alias.name.split(".")[0] == "torchdata" for alias in names):
                return True
            case ast.ImportFrom(names=names) if any(alias.name == "WorkersReadingService" for alias in names):
                return True
            case ast.Attribute(attr=name) if name in form_names.TORCHDATA_FORMS | form_names.TORCHDATA_MAP_FORMS:
                return True
    return False
