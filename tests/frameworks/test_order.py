"""A global order under training frameworks: resumed on other ranks, a run trains on the samples of an unbroken run."""

import json
import signal
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.test_accelerate import KILLED as ACCELERATE
from tests.frameworks.test_lightning import RECORDER
from tests.kits.framework_kit import RECORDING_MODEL, SIZES, RankServer, example, make_shards

pytestmark = pytest.mark.slow

#: Takes the place of the manual's pipe.
ORDERED = """
def train_pipe(batch=8):
    return (
        IterableWrapper(["train-{000000..000006}.tar"]).list_shards().load_in_order(even="pad", run=4)
        .wds_decode("torchrgb").wds_map(prepare).batch(batch).collate(wds_collate)
    )
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        with RankServer("lightning", "accelerate") as server:
            yield server


def trained(folder: Path, phase: str, world: int) -> list[Any]:
    """Returns what a run has trained on, by position: labels, with the epoch if that was noted."""
    files = [folder / f"{phase}-{rank}.jsonl" for rank in range(world)]
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    batches = [batch for step in zip_longest(*ranks, fillvalue=[]) for batch in step if batch]
    if isinstance(batches[0][1], list):
        return [(epoch, label) for epoch, labels in batches for label in labels]
    return [label for labels in batches for label in labels]


LIGHTNING = """
phase, workers, kill_at, resume_from = sys.argv[1:]
model = Recorder(f"{phase}-{os.environ.get('RANK', 0)}.jsonl", int(kill_at) or None)
fit(model, phase, resume_from or None, int(workers))
"""
#: How many ranks, the step at which the run is killed, how many ranks and workers resume it. An epoch has 18 batches of
#: one rank, or 9 of two.
RESUMED = [(1, 7, 2, 2), (1, 12, 2, 0), (1, 18, 2, 0), (1, 24, 2, 0), (2, 6, 1, 2), (2, 9, 1, 0)]


def test_lightning_resumes_on_other_ranks_with_the_next_sample(tmp_path: Path, server: RankServer) -> None:
    """Lightning counts batches, and ended the epoch when that count was the new loader's length: samples were lost."""
    make_shards(tmp_path)

    def run(phase: str, world: int, workers: int, kill_at: int = 0, resume_from: str = "") -> list[Any]:
        code = example("Lightning").replace("every_n_train_steps=5", "every_n_train_steps=1")
        code = code.replace("devices=2", f"devices={world}").replace('"ddp"', '"ddp"' if world > 1 else '"auto"')
        arguments = (phase, str(workers), str(kill_at), resume_from)
        for rank in server.launch(code + ORDERED + RECORDER + LIGHTNING, tmp_path, *arguments, world=world):
            assert rank.returncode == (-signal.SIGKILL if kill_at else 0), rank.stderr
        return trained(tmp_path, phase, world)

    whole = run("whole", 1, 0)
    assert whole == run("other", 2, 2)
    for epoch in range(2):
        assert sorted(label for number, label in whole if number == epoch) == list(range(sum(SIZES)))
    for number, (world, kill_at, next_world, workers) in enumerate(RESUMED):
        first = run(f"first{number}", world, 0, kill_at)
        second = run(f"second{number}", next_world, workers, 0, f"first{number}/last.ckpt")
        assert first + second == whole, (world, kill_at, next_world)


def test_accelerate_resumes_on_other_ranks_with_the_next_sample(tmp_path: Path, server: RankServer) -> None:
    """Its checkpoint has one copy of the state, which all ranks load: the manual's example."""
    make_shards(tmp_path)
    script = example("Accelerate") + ORDERED + RECORDING_MODEL + ACCELERATE

    def run(phase: str, world: int, folder: str = "") -> list[Any]:
        code = script.replace('"whole" if phase == "whole" else "broken"', repr(folder or phase))
        code = code.replace("os.environ['RANK']", "RANK")
        code = code.replace("phase, workers = sys.argv", "RANK = os.environ.get('RANK', 0)\nphase, workers = sys.argv")
        for rank in server.launch(code, tmp_path, phase, "2", world=world):
            assert rank.returncode == (-signal.SIGKILL if phase == "killed" else 0), rank.stderr
        return trained(tmp_path, phase, world)

    whole = run("whole", 1)
    assert sorted(whole) == sorted([*range(sum(SIZES))] * 2)
    # The last checkpoint is that of step 10: in the first epoch of one rank, one step into the second epoch of two.
    for world, saved in ((1, 10 * 8), (2, sum(SIZES) + 2 * 8)):
        folder = f"of-{world}"
        first = run("killed", world, folder)[:saved]
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["step-00000005", "step-00000010"]
        assert first + run("resumed", 3 - world, folder) == whole
