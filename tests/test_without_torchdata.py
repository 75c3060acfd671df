"""Where torchdata is not installed the package works with torch alone; tests that need torchdata are skipped."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits import torchdata as kit
from torchdata_wds.pipes import form_names
from torchdata_wds.workers import import_torchdata

HIDING = Path(kit.__file__).parent / "without_torchdata"

#: Modules of the tests that import torchdata: the kit, and an example of a training script.
MAY_IMPORT = {"torchdata.py", "train_ddp.py", "__init__.py"}

#: In the text of every module that imports torchdata, or what needs it, from elsewhere than the kit.
NAMES_TORCHDATA = re.compile(r"(?<!tests\.kits\.)\btorchdata\b|\b(?:Workers|Ray)ReadingService\b")

PROGRAM = """
import subprocess, sys
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
from torchdata_wds import StatefulPipeline, TarWriter, WebDataset, wds_collate
from torchdata_wds.cli.main import main

assert subprocess.run([sys.executable, "-c", "import torchdata"], stderr=subprocess.DEVNULL).returncode == 1
with TarWriter("x.tar") as writer:
    for number in range(5):
        writer.write({"__key__": str(number), "cls": number})
def labels():
    pipe = IterableWrapper(["x.tar"]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()
    return pipe.wds_shuffle(9).wds_decode().wds_to_tuple("cls").batch(2).collate(wds_collate)
for loader in (labels(), DataLoader(labels(), batch_size=None), StatefulPipeline(labels())):
    assert sorted(label for (labels,) in loader for label in labels.tolist()) == [0, 1, 2, 3, 4]
assert len(list(WebDataset("x.tar", decoder="pil", extensions="cls"))) == 5
for name in ("set_length", "enumerate", "prefetch"):
    try:
        getattr(labels(), name)
    except AttributeError as error:
        assert "which cannot be imported here: No module named" in str(error), error
try:
    torchdata_wds.WorkersReadingService
except ImportError as error:
    assert "needs torchdata 0.9" in str(error)
assert main(["ls", "x.tar"]) == 0
"""


@pytest.mark.slow
def test_package_works_when_torchdata_is_hidden(tmp_path: Path) -> None:
    """In a process of its own, and in those that it starts."""
    paths = [str(HIDING), str(kit.TESTS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_test_modules_import_torchdata_from_the_kit() -> None:
    """An import of their own would be an error where torchdata is not installed."""
    for path in sorted(kit.TESTS.rglob("*.py")):
        text = path.read_text()
        if path.name in MAY_IMPORT or not NAMES_TORCHDATA.search(text):  # then it has no such import to be parsed for
            continue
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
        nodes = [node for node in nodes if getattr(node, "module", None) != "tests.kits.torchdata"]
        assert not any(map(kit.uses_torchdata, nodes)), path


@pytest.fixture
def _no_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if torchdata were not installed, as far as its form cycle goes."""

    def fail() -> None:
        raise ImportError("No module named 'torchdata'")

    monkeypatch.setattr(kit, "is_installed", lambda: False)
    monkeypatch.delitem(IterDataPipe.functions, "cycle", raising=False)
    form_names.install(fail)
    yield
    form_names.install(import_torchdata)


def cycled() -> Any:
    return IterableWrapper([1]).cycle()


def unknown() -> Any:
    return IterableWrapper([1]).cycles()


def in_the_package(source: str) -> Callable[[], Any]:
    """A function as if a module of the package had it."""
    names: dict[str, Any] = {"pipe": IterableWrapper([1])}
    exec(compile(f"def call(): return {source}", str(Path(torchdata_wds.__file__)), "exec"), names)
    return names["call"]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("_no_form")
@pytest.mark.parametrize(
    ("call", "is_reason"), [(cycled, True), (unknown, False), (in_the_package("pipe.cycle()"), False)]
)
def test_test_is_skipped_when_it_names_a_form_itself(call: Callable[[], Any], is_reason: bool) -> None:
    """The package's own use of a form stays a failure, and so does an unknown name."""
    with pytest.raises(AttributeError) as caught:
        call()
    try:
        kit.skip_own_forms(caught.value)
        skipped = False
    except pytest.skip.Exception:
        skipped = True
    assert skipped is is_reason
