"""Functional names survive every way in which the package is imported more than once."""

import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import IterDataPipe

from tests.kits.forms import functional_forms
from tests.kits.processes import in_child
from torchdata_wds import pipes
from torchdata_wds.pipes import base
from torchdata_wds.pipes.base import register

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
        IterableWrapper([1]).wds_rename, IterableWrapper([1]).join_workers
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
    base.functional_forms.pop("wds_spare_name", None)


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
    """What made an import fail is what the user sees, when a form is first used."""
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
    assert "shuffle" not in base.functional_forms


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


def test_register_tells_every_form_to_the_package() -> None:
    """A form that only its own module knew would be missing until something imported that."""
    for module in pkgutil.walk_packages(pipes.__path__, "torchdata_wds.pipes."):
        importlib.import_module(module.name)
    assert {form: cls for form, cls in base.functional_forms.items() if form != "wds_spare_name"} == functional_forms


# ------------------------------------------------------------------------------------ forms before their first use
BEFORE_USE = """
import inspect, json, pickle, pydoc, sys
{imports}
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

def modules():
    return sorted(name for name in sys.modules if name.startswith("torchdata_wds."))

pipe = IterableWrapper([1])
forms = {{name: form for name, form in IterDataPipe.functions.items() if form.__module__.startswith("torchdata_wds.")}}
facts = {{"modules": modules(), "names": sorted(forms), "missing": sorted(set(forms) - set(dir(pipe)))}}
later = forms["wds_shuffle"]
facts["owner"], facts["copied"] = repr(later), repr(pickle.loads(pickle.dumps(later)))
facts["after repr"] = modules()
facts["arguments"], facts["doc"] = str(inspect.signature(later)), pydoc.render_doc(later)
facts["made"] = repr(forms["wds_to_tuple"](pipe, "cls"))
form = pipe.wds_map
facts["form"] = [type(form).__name__, str(inspect.signature(form)), form.__doc__, repr(pipe.wds_map(len))]
facts["kept"] = [repr(later(pipe, 5)), type(later(pipe, 5)) is type(pipe.wds_shuffle())]
print(json.dumps(facts))
"""

ORDERS = {
    "before": "import torchdata_wds\nassert 'torch' not in sys.modules",
    "after": "import torch, torchdata_wds",
    "from": "from torchdata_wds import TarWriter\nassert 'torch' not in sys.modules",
    "thread": (
        "import threading\nimporting = threading.Thread(target=__import__, args=('torch',))\nimporting.start()\n"
        "while 'torch' not in sys.modules: pass\nimport torchdata_wds\nimporting.join()"
    ),
    "unpickled": (
        "assert pickle.loads(b'ctorchdata_wds.format.shards\\nShardInfo\\n.').__name__ == 'ShardInfo'\n"
        "assert 'torch' not in sys.modules"
    ),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "after" else pytest.mark.slow) for name in sorted(ORDERS)],
)
def before_use(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a process sees of the forms whose pipes it has not used, by the order of its imports."""
    code = BEFORE_USE.format(imports=ORDERS[request.param])
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_forms_are_there_when_their_pipes_are_not_imported(before_use: dict[str, Any]) -> None:
    """The import of the package, or of torch after it, registers all of them and imports none of their modules."""
    assert before_use["names"] == sorted(functional_forms)
    assert before_use["missing"] == []
    assert [name for name in before_use["after repr"] if name.startswith("torchdata_wds.pipes.s")] == []
    assert before_use["owner"] == before_use["copied"] == repr(functional_forms["wds_shuffle"])


def test_forms_look_as_ever_when_they_are_used_first(before_use: dict[str, Any]) -> None:
    """Arguments, docstring, drawing and the pipe itself."""
    assert before_use["arguments"] == str(inspect.signature(functional_forms["wds_shuffle"]))
    assert "Shuffles items through a buffer" in before_use["doc"]
    assert before_use["made"] == "IterableWrapper([1])\n    .wds_to_tuple('cls')"
    mapper = functional_forms["wds_map"]
    arguments, address = str(inspect.signature(mapper)), re.compile("at 0x[0-9a-f]+")
    kind, found, text, drawing = before_use["form"]
    assert (kind, address.sub("", found), text) == ("partial", address.sub("", arguments), mapper.__doc__)
    assert drawing == "IterableWrapper([1])\n    .wds_map(len)"
    assert before_use["kept"] == ["IterableWrapper([1])\n    .wds_shuffle(5)", True]


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
    assert len(json.loads(done.stdout)) < 20
