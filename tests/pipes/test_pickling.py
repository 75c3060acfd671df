"""Functions that cannot be sent to other processes: the error names the stage and the cure."""

import copy
import functools
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any

import cloudpickle
import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.torchdata import needs_torchdata
from tests.kits.workers_kit import loader_of, run_script
from torchdata_wds.pipes.pickling import check_main_functions


def same(item: Any) -> Any:
    return item


def inner() -> Callable[[Any], Any]:
    def local(item: Any) -> Any:
        return item

    return local


GRAPHS: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: IterableWrapper([1]).wds_map(lambda item: item), r"wds_map holds a lambda \(.*\.py:\d+\)"),
    "inner": (lambda: IterableWrapper([1]).wds_map(inner()), "wds_map holds the inner function local"),
    "partial": (lambda: IterableWrapper([1]).wds_map(functools.partial(inner())), "wds_map holds the inner function"),
    "fields": (
        lambda: IterableWrapper([{"__key__": "a", "c": 1}]).wds_map_dict(c=lambda value: value),
        "wds_map_dict holds a lambda",
    ),
    "handler": (lambda: IterableWrapper([1]).wds_map(same, handler=lambda _: True), "wds_map holds a lambda"),
    "compose": (lambda: IterableWrapper([1]).wds_compose(lambda items: items), "wds_compose holds a lambda"),
    "native before": (lambda: IterableWrapper([1]).map(lambda item: item).wds_map(same), "map holds a lambda"),
    "native after": (lambda: IterableWrapper([1]).wds_map(same).batch(1).map(inner()), "map holds the inner function"),
}


@needs_torchdata
@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported")
@pytest.mark.parametrize(("build", "says"), GRAPHS.values(), ids=GRAPHS)
def test_loader_names_the_stage_when_it_cannot_be_pickled(build: Callable[[], Any], says: str) -> None:
    """DataLoader2 copies its graph by pickle, whatever runs it."""
    with pytest.raises(pickle.PicklingError, match=f"{says}.*function of a module.*install dill"):
        loader_of(build())


@pytest.mark.filterwarnings("ignore:(Lambda|Local) function is not supported")
@pytest.mark.parametrize(("build", "says"), GRAPHS.values(), ids=GRAPHS)
def test_graphs_are_copied_as_ever_when_nothing_is_pickled(build: Callable[[], Any], says: str) -> None:
    """Where functions need no pickling, or something stronger does it, lambdas work."""
    pipe = build()
    items = list(pipe)
    assert list(copy.deepcopy(pipe)) == items
    assert list(cloudpickle.loads(cloudpickle.dumps(pipe))) == items
    assert "holds" in says


@pytest.mark.filterwarnings("ignore:Got pickle error")
def test_torch_loader_names_the_stage_when_its_workers_are_spawned() -> None:
    """Torch's DataLoader sends its graph when its workers start."""
    pipe = IterableWrapper([1]).wds_map(lambda item: item)
    loader = DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(pickle.PicklingError, match="wds_map holds a lambda"):
        iter(loader)


class Settings:
    """A class of a main module."""


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """A main module that is not a file, and how something gets into it."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)

    def define(value: Any) -> Any:
        monkeypatch.setattr(value, "__module__", "__main__")
        setattr(main, value.__name__, value)
        return value

    return define


def test_main_functions_are_named_when_the_main_module_is_no_file(notebook: Callable[[Any], Any]) -> None:
    """Wherever a stage holds them, by themselves, in a partial, as the class of an object."""
    function, kind = notebook(same), notebook(Settings)
    for held, name in ((function, "same"), (functools.partial(function), "same"), (kind(), "Settings")):
        pipe = IterableWrapper([held]) if name == "Settings" else IterableWrapper([1]).wds_map(held)
        stage = "IterableWrapper" if name == "Settings" else "wds_map"
        with pytest.raises(RuntimeError, match=f"{stage} holds {name}, which is defined in __main__"):
            check_main_functions(pipe.batch(2))
    with pytest.raises(RuntimeError, match="the service holds same"):
        check_main_functions(IterableWrapper([1]), [function, None])
    check_main_functions(IterableWrapper([len]).wds_map(str), [None])


def test_main_functions_are_sent_when_the_main_module_is_a_file(
    notebook: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spawned process imports it again."""
    pipe = IterableWrapper([1]).wds_map(notebook(same))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "train.py", raising=False)
    check_main_functions(pipe)


SCRIPT = """
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds.workers.service import DataLoader2, WorkersReadingService
def double(item): return 2 * item
service = WorkersReadingService(1, multiprocessing_context="spawn")
loader = DataLoader2(IterableWrapper([1, 2]).wds_map(double), reading_service=service)
try:
    list(loader)
except RuntimeError as error:
    print(error)
"""


@needs_torchdata
def test_service_names_the_stage_when_the_main_module_is_no_file(
    notebook: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before workers are started, of which each would print a traceback."""
    monkeypatch.setattr(SpawnProcess, "start", lambda _: pytest.fail("a worker was started"))
    pipe = IterableWrapper([1, 2]).wds_map(notebook(same))
    with (
        loader_of(pipe, 1, multiprocessing_context="spawn") as loader,
        pytest.raises(RuntimeError, match="wds_map holds same, which is defined in __main__"),
    ):
        list(loader)


@needs_torchdata
@pytest.mark.slow
def test_service_names_the_stage_when_python_runs_a_command() -> None:
    """A real main module without a file."""
    done = run_script(SCRIPT)
    assert "wds_map holds double, which is defined in __main__" in done.stdout
    assert not done.stderr


GUARDED = """
if __name__ == "__main__":
    from torch.utils.data.datapipes.iter import IterableWrapper
    from torchdata_wds.workers.service import DataLoader2, WorkersReadingService
    def double(item): return 2 * item
    for size in (1, 1_000_000):
        service = WorkersReadingService(1, multiprocessing_context="spawn")
        loader = DataLoader2(IterableWrapper(["x" * size]).wds_map(double), reading_service=service)
        try:
            list(loader)
        except RuntimeError as error:
            print(error)
"""


@needs_torchdata
@pytest.mark.slow
def test_service_explains_when_a_worker_cannot_import_what_it_is_sent(tmp_path: Any) -> None:
    """A function that only the main process has defined, in a graph of any size."""
    script = tmp_path / "train.py"
    script.write_text(GUARDED)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "Can't get attribute 'double'" in done.stderr
    assert done.stdout.count("ended before it could begin") == done.stdout.count("into a module") == 2


UNGUARDED = """
import sys
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WdsLoader
list(WdsLoader(IterableWrapper([1, 2]), num_workers=1, multiprocessing_context=sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_loader_explains_when_a_script_has_no_guard(context: str, tmp_path: Any) -> None:
    """Workers import it, and from Python 3.14 on so does the server that forks them."""
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), context]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("RuntimeError: worker 0 of 1 ended before it could begin")


def test_service_starts_forked_workers_when_functions_are_of_a_notebook(notebook: Callable[[Any], Any]) -> None:
    """A forked worker has them already."""
    pipe = IterableWrapper([1, 2]).wds_map(notebook(same))
    with loader_of(pipe, 1, multiprocessing_context="fork") as loader:
        assert list(loader) == [1, 2]
