"""The command ``bench``: shards or a function's pipe, measured; wrong input is named before anything runs."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.kits.processes import wait_until
from tests.kits.servers import serve_folder
from tests.kits.shards import image_samples, write_tar, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.bench.charts import draw_chart
from torchdata_wds.workers.profile.pipe_profile import PipeProfile, StageProfile, WorkersProfile

MODULE = "bench_subjects"
FUNCTIONS = """
import time
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata_wds import WdsLoader


def doze(number):
    time.sleep(0.002)
    return number


def fail(number):
    raise LookupError("no such thing")


def slow():
    return IterableWrapper(range(50)).sharding_filter().wds_map(doze)


def loader():
    return WdsLoader(slow(), 3)


def failing():
    return IterableWrapper(range(50)).wds_map(fail)


def step(batch):
    time.sleep(0.001)


def number():
    return 3


def broken():
    raise LookupError("not today")


def empty():
    return IterableWrapper([])
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with a module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{MODULE}.py").write_text(FUNCTIONS)
    yield tmp_path
    assert str(tmp_path) not in sys.path
    sys.modules.pop(MODULE, None)


def figures_of(*arguments: object) -> dict[str, Any]:
    """What ``--json -`` writes, after a short run."""
    done = run_wds("bench", "--seconds", "0.1", "--json", "-", *arguments)
    assert done.status == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def stages_of(found: dict[str, Any]) -> list[str]:
    """The names of the stages."""
    return [stage["stage"] for stage in found["stages"]]


# --------------------------------------------------------------------------------------------------------- measuring
def test_shards_are_read_decoded_and_batched(here: Path) -> None:
    """The stages are those of the options, and an item is a batch."""
    write_tar(here / "x.tar", image_samples("a", 40))
    found = figures_of("x.tar", "--decode", "rgb8", "--batch", "5", "--workers", "0")
    assert stages_of(found)[-4:] == [
        "load_wds_shards().group_by_key()",
        "wds_decode('rgb8')",
        "batch(5)",
        "collate(conversion=collate_if_alike)",
    ]
    assert found["samples_per_item"] == pytest.approx(5, rel=0.1)
    assert [run["workers"] for run in found["runs"]] == [0]
    assert found["subject"] == "x.tar"


@pytest.mark.slow
def test_a_function_is_measured_with_tables_a_file_and_a_chart(here: Path) -> None:
    """All outputs of one run; existing files are kept."""
    outputs = ("--json", "x.json", "--chart", "x.png")
    arguments = (
        "bench",
        "--seconds",
        "0.3",
        f"{MODULE}:slow",
        "--workers",
        "0,2",
        "--step",
        f"{MODULE}:step",
        *outputs,
    )
    done = run_wds(*arguments)
    assert done.status == 0, done.err
    assert "wds_map(doze) takes" in done.text
    assert "2 workers give" in done.text
    assert "the loader makes" in done.text
    found = json.loads((here / "x.json").read_text())
    assert found["subject"] == f"{MODULE}:slow"
    assert [run["workers"] for run in found["runs"]] == [0, 2]
    with Image.open(here / "x.png") as image:
        assert image.width == 1920
    again = run_wds(*arguments)
    assert again.status == 1
    assert "exists" in again.err
    assert run_wds(*arguments, "--force").status == 0


@pytest.mark.slow
def test_a_loader_is_measured_with_its_workers_too(here: Path) -> None:
    """Besides those that are tried anyway."""
    assert [run["workers"] for run in figures_of(f"{MODULE}:loader")["runs"]] == [0, 1, 2, 3, 4]


@pytest.mark.slow
def test_remote_shards_are_measured_without_their_secrets(here: Path) -> None:
    """A signed URL is masked in every output."""
    write_text_shards(here, [30])
    with serve_folder(here) as address:
        url = f"{address}/shard-000000.tar?X-Amz-Signature=secretsecret"
        found = figures_of(url, "--workers", "0")
    assert "secretsecret" not in json.dumps(found)
    assert "shard-000000.tar" in found["subject"]


# ----------------------------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--seconds", "0", "x.tar"], 2, "above 0"),
        (["--workers", "two", "x.tar"], 2, "0,1,2,4"),
        (["--batch", "0", "x.tar"], 2, "1 or more"),
        (["--chart", "x.pdf", "x.tar"], 2, ".png"),
        (["-"], 2, "only once"),
        (["missing.tar"], 1, "missing.tar"),
        (["x.tar", "--decode", "rgb9"], 2, "rgb9"),
        ([f"{MODULE}:slow", "--decode", "pil"], 2, "for shards"),
        ([f"{MODULE}:nothing"], 1, "no function"),
        (["no_module_of_this_name:f"], 1, "no module"),
        ([f"{MODULE}:slow", "--step", "x.py"], 2, "module:function"),
        ([f"{MODULE}:slow", "--step", f"{MODULE}:nothing"], 1, "no function"),
        ([f"{MODULE}:number"], 2, "must return a pipe"),
        ([f"{MODULE}:broken"], 1, "not today"),
        ([f"{MODULE}:failing"], 1, "no such thing"),
        ([f"{MODULE}:empty"], 1, "no items"),
        (["empty.tar"], 1, "no items"),
    ],
)
def test_mistakes_are_named(arguments: list[str], status: int, words: str, here: Path) -> None:
    """In one message, without the program's own traceback."""
    write_text_shards(here, [0])
    (here / "shard-000000.tar").rename(here / "empty.tar")
    write_tar(here / "x.tar", image_samples("a", 1))
    done = run_wds("bench", *arguments)
    assert done.status == status
    assert words in done.err
    assert "cli/main.py" not in done.err


# ------------------------------------------------------------------------------------------------------------ charts
def profile_of(rates: list[float], step_rate: float | None = None) -> PipeProfile:
    """A profile of two stages and some runs."""
    stages = (
        StageProfile("load_wds_shards().group_by_key()", 100, 0.2, 0.15, 0.2, 0.002, 500, False),
        StageProfile("wds_map(a function with a very long name, " * 5 + ")", 100, 0.8, 0, 0.8, 0.008, 100, False),
    )
    runs = tuple(WorkersProfile(n, 9, 1.0, rate, 0.1, 1.0, None, None, None, None) for n, rate in enumerate(rates))
    return PipeProfile(2, 1.0, 64.0, stages, 0.0, runs, step_rate)


@pytest.mark.parametrize("profile", [profile_of([]), profile_of([1e-4]), profile_of([20, 35.5, 3e6], 4e6)])
def test_charts_of_any_figures_are_drawn(profile: PipeProfile) -> None:
    """No runs, very small and very large rates, long names, unknown memory."""
    with Image.open(BytesIO(b"".join(draw_chart(profile, "x" * 300)))) as image:
        assert image.getcolors(100_000) is not None
        assert image.height > 200


@pytest.mark.slow
def test_an_interrupt_ends_everything(here: Path) -> None:
    """Ctrl-C, while workers run: exit status 130, a quiet end, and no worker is left."""
    write_tar(here / "x.tar", image_samples("a", 40))
    command = [sys.executable, "-m", "torchdata_wds", "bench", "--seconds", "12", "--workers", "2", "x.tar"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as bench:
        assert wait_until(lambda: len(pids_of_session(bench.pid)) == 3)
        bench.send_signal(signal.SIGINT)
        _, said = bench.communicate(timeout=60)
    assert bench.returncode == 130
    assert "Traceback" not in said
    assert pids_of_session(bench.pid) == []


def pids_of_session(session: int) -> list[int]:
    """The processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[3]) == session:
                found.append(int(stat.parent.name))
    return found


def test_damage_is_skipped_on_request(tmp_path: Path) -> None:
    """A field that does not decode ends the command, or is left out by ``--errors skip``."""
    samples = [("a.jpg", b"no image"), ("b.cls", b"1"), ("c.cls", b"2")]
    arguments = (
        "bench",
        "--seconds",
        "0.1",
        "--workers",
        "0",
        "--decode",
        "pil",
        write_tar(tmp_path / "x.tar", samples),
    )
    refused = run_wds(*arguments)
    assert refused.status == 1
    assert "skip such samples with --errors skip" in refused.err
    assert run_wds(*arguments, "--errors", "skip").status == 0
