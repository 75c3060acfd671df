"""Functional names survive every way in which the package is imported more than once."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from tests.kits.processes import in_child
from torchdata_wds.pipes.base import functional_forms, register

# A process of its own: what is imported here would be seen by all other tests.
SCRIPT = """
import importlib, importlib.abc, io, json, pathlib, pkgutil, sys, tarfile, tempfile
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

native = set(IterDataPipe.functions)
path = pathlib.Path(tempfile.mkdtemp(), "x-0.tar")
with tarfile.open(path, "w") as tar:
    for name in ("a.cls", "a.txt", "b.cls", "b.txt"):
        info = tarfile.TarInfo(name)
        info.size = 1
        tar.addfile(info, io.BytesIO(b"1"))

def outcome():
    pipe = IterableWrapper([str(path.with_name("x-{0..0}.tar"))]).list_shards().sharding_filter().load_wds_shards()
    samples = list(pipe.group_by_key().wds_decode().wds_to_tuple("__key__", "cls", "txt").wds_map_tuple(None, str))
    return {"names": sorted(set(IterDataPipe.functions) - native), "samples": samples}

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "torchdata_wds"]:
        del sys.modules[name]

class FailOnce(importlib.abc.MetaPathFinder):
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, path, target=None):
        if name == self.name:
            self.name = None
            raise ImportError("a dependency is missing")

def failure():
    try:
        importlib.import_module("torchdata_wds")
    except Exception as error:
        return f"{type(error).__name__}: {error}"

results = {}

sys.meta_path.insert(0, FailOnce("torchdata_wds.pipes.samples.fields"))
results["failed import"] = failure()
results["import after a failed one"] = (failure(), outcome())

forget()
sys.meta_path.insert(0, FailOnce("torchdata_wds.pipes.streams.join_workers"))
results["failed second import"] = failure()
forget()
results["import after all was forgotten"] = (failure(), outcome())

import torchdata_wds
results["import twice"] = (failure(), outcome())

importlib.reload(torchdata_wds)
results["reload of the package"] = (None, outcome())

import torchdata_wds.pipes
modules = [torchdata_wds.pipes, *(
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(torchdata_wds.pipes.__path__, "torchdata_wds.pipes.")
)]
for module in modules:
    importlib.reload(module)
importlib.reload(torchdata_wds)
results["reload of every module"] = (None, outcome())

print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What happened in a process that imported the package in every odd way."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture
def spare_name() -> Iterator[str]:
    """A functional name that is free again afterwards."""
    yield "wds_spare_name"
    IterDataPipe.functions.pop("wds_spare_name", None)
    functional_forms.pop("wds_spare_name", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "import after a failed one",
        "import after all was forgotten",
        "import twice",
        "reload of the package",
        "reload of every module",
    ],
)
def test_registration_keeps_every_name_when_imported_again(results: dict[str, Any], way: str) -> None:
    """No way of importing again ends in "already taken", and the forms work afterwards."""
    error, outcome = results[way]
    assert error is None
    assert outcome["names"] == sorted(functional_forms)
    assert outcome["samples"] == [["a", "1", "1"], ["b", "1", "1"]]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["failed import", "failed second import"])
def test_registration_shows_the_real_error_when_an_import_fails(results: dict[str, Any], way: str) -> None:
    """What made an import fail is what the user sees."""
    assert results[way] == "ImportError: a dependency is missing"


class Foreign(IterDataPipe[Any]):
    """A pipe of another package."""


def test_registration_names_the_owner_when_another_package_has_a_name_at_import() -> None:
    """A name that another package took is an error of the import that says who has it."""

    def import_again() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchdata_wds"]:
            del sys.modules[name]
        del IterDataPipe.functions["wds_unbatch"]
        IterDataPipe.register_datapipe_as_function("wds_unbatch", Foreign)
        with pytest.raises(RuntimeError, match=f"^the functional name 'wds_unbatch' already belongs to {Foreign}$"):
            importlib.import_module("torchdata_wds")

    assert in_child(import_again) == 0


def test_register_names_the_owner_when_a_name_is_torchs_own() -> None:
    """A native form is never replaced."""
    with pytest.raises(RuntimeError, match=r"'shuffle' already belongs to .*ShufflerIterDataPipe"):
        register("shuffle")(IterDataPipe)
    assert "shuffle" not in functional_forms


def test_register_names_the_owner_when_it_is_a_plain_function(spare_name: str) -> None:
    """Torch also takes functions under a name: then the function is the owner."""

    def foreign_function(source: object) -> object:
        return source

    IterDataPipe.register_function(spare_name, foreign_function)
    with pytest.raises(RuntimeError, match=r"already belongs to .*foreign_function"):
        register(spare_name)(IterDataPipe)


def test_register_takes_the_newer_class_when_it_is_defined_again(spare_name: str) -> None:
    """The same class, defined a second time, replaces the first."""

    def define() -> type[IterDataPipe[Any]]:
        @register(spare_name)
        class Own(IterDataPipe[Any]):
            def __init__(self, source: object) -> None:
                self.source = source

        return Own

    first, second = define(), define()
    made = IterDataPipe.functions[spare_name](None)
    assert type(made) is second
    assert type(made) is not first


# Of the standard library: what takes long to import, and is needed by some users only, or only later.
HEAVY = {"asyncio", "http", "lzma", "sqlite3", "ssl", "tarfile"}

IMPORT = """
import json, sys
import torch, torch.utils.data
before = set(sys.modules)
import torchdata_wds
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.mark.slow
def test_import_adds_no_heavy_modules_to_torchs() -> None:
    """Importing the package brings no other package, and no heavy part of the standard library."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    names = {module.partition(".")[0] for module in json.loads(done.stdout)}
    assert names - sys.stdlib_module_names == {"torchdata_wds"}
    assert not names & HEAVY
