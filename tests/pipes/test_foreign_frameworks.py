"""The real Accelerate, Trainer and Lightning around a pipe: what an epoch yields on one rank and on two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.kits.framework_kit import RankServer
from tests.kits.shards import write_text_shards
from tests.kits.torchdata import is_installed
from tests.kits.workers_kit import ROOT

pytestmark = pytest.mark.slow

SIZES = (5, 3, 7, 5, 6, 4, 9, 3)
COUNT = sum(SIZES)
EQUAL = (6,) * 8

#: What every script begins with: each case notes what this rank has got and what the package has logged.
BEGINNING = """
import json, logging, os, sys
import torch
from torch.utils.data import DataLoader
from torchdata_wds import DivisionError, StatefulPipeline, WebDataset, handlers

folder, *urls = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))

def number_of(sample):
    return int(sample["__key__"].replace("s", "").replace("-", ""))

def pipe_of(shuffle=4):
    return WebDataset(urls, shuffle=shuffle).map(number_of)

def note(case, run):
    handlers.said.clear()
    logger, handler = logging.getLogger("torchdata_wds"), logging.FileHandler(f"{folder}/{case}-{rank}.log")
    logger.addHandler(handler)
    try:
        found = run()
    except DivisionError as error:
        found = str(error)
    logger.removeHandler(handler)
    handler.close()
    with open(f"{folder}/{case}-{rank}.json", "w") as file:
        json.dump(found, file)
"""


class Ranks:
    """What the ranks of a finished run have noted."""

    def __init__(self, folder: Path, ranks: int, stderr: str) -> None:
        self.folder, self.ranks, self.stderr = folder, ranks, stderr

    def found(self, case: str) -> list[Any]:
        return [json.loads((self.folder / f"{case}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def said(self, case: str) -> str:
        return "".join((self.folder / f"{case}-{rank}.log").read_text() for rank in range(self.ranks))

    def check(self, case: str, *, times: int = 1) -> None:
        """All ranks together have got each sample as often as they read the data."""
        found = Counter(chain(*self.found(case)))
        assert len(found) == COUNT, f"{case}: {COUNT - len(found)} are lost"
        assert set(found.values()) == {times}, case


#: What every process has in its environment.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    """Starts ranks that have imported the frameworks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with RankServer("accelerate", "transformers.trainer", "lightning") as server:
            yield server


def fork_ranks(server: RankServer, program: str, folder: Path, ranks: int = 2, sizes: Any = SIZES) -> Ranks:
    """Runs a program as ranks, or alone, and returns what they have noted; none may fail."""
    urls = write_text_shards(folder, sizes)
    done = server.launch(BEGINNING + program, folder, str(folder), *urls, world=ranks, seconds=240)
    stderr = "".join(rank.stderr for rank in done)
    assert [rank.returncode for rank in done] == [0] * ranks, stderr
    return Ranks(folder, ranks, stderr)


def run_torchrun(program: str, folder: Path, seconds: int = 240) -> tuple[int, Ranks]:
    """Runs a program by torchrun as two ranks, and returns its exit status; never waits longer than `seconds`."""
    script = folder / "program.py"
    script.write_text(BEGINNING + program)
    urls = write_text_shards(folder, SIZES)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [sys.executable, *launcher, str(script), str(folder), *urls]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=folder, env=environment
    ) as process:  # fmt: skip
        try:
            _, stderr = process.communicate(timeout=seconds)
        finally:
            if process.poll() is None:  # torchrun ends its ranks when it is terminated
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                process.kill()
    return process.returncode, Ranks(folder, 2, stderr)


ACCELERATE = """
def epoch_of(dataset, epochs=1, config=None, **options):
    from accelerate import Accelerator  # spawned workers have no use for it
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config or {}))
    loader = accelerator.prepare(DataLoader(dataset, batch_size=1, **options))
    return [int(number) for _ in range(epochs) for batch in loader for number in batch]

def main():
    from tests.kits.torchdata import is_installed

    modes = {"default": {}, "dispatch": {"dispatch_batches": True}, "own": {"dispatch_batches": False}}
    for name, config in modes.items():
        for workers in (0, 2):
            note(f"{name}-{workers}", lambda: epoch_of(pipe_of(), epochs=2, config=config, num_workers=workers))
    note("spawn", lambda: epoch_of(pipe_of(), num_workers=2, multiprocessing_context="spawn"))
    note("unshuffled", lambda: epoch_of(pipe_of(0), config={"dispatch_batches": False}, num_workers=2))
    note("pipeline-0", lambda: epoch_of(StatefulPipeline(pipe_of())))
    note("pipeline-2", lambda: epoch_of(StatefulPipeline(pipe_of()), epochs=2, num_workers=2))
    if is_installed():
        stateful = {"use_stateful_dataloader": True}
        note("stateful", lambda: epoch_of(pipe_of(), epochs=2, config=stateful, num_workers=2))
        note("resumable", lambda: epoch_of(StatefulPipeline(pipe_of()), epochs=2, config=stateful, num_workers=2))
    own = {"dispatch_batches": False}
    note("pipeline-own", lambda: epoch_of(StatefulPipeline(pipe_of()), config=own))

if __name__ == "__main__":
    main()
"""


def test_frameworks_accelerate_loses_nothing_on_two_ranks(tmp_path: Path, server: RankServer) -> None:
    """Torch would divide the pipe among ranks, or not at all, and Accelerate divides its items."""
    ranks = fork_ranks(server, ACCELERATE, tmp_path)
    for mode, words in (
        ("default", "rank 0 reads for all"),
        ("dispatch", "rank 0 reads for all"),
        ("own", "each of 2"),
    ):
        for workers in (0, 2):
            ranks.check(f"{mode}-{workers}", times=2)
            assert words in ranks.said(f"{mode}-{workers}")
            assert "prepare()" in ranks.said(f"{mode}-{workers}")
    for case in ("spawn", "unshuffled", "pipeline-0"):
        ranks.check(case)
    for case in ("pipeline-2", "stateful", "resumable") if is_installed() else ("pipeline-2",):
        ranks.check(case, times=2)
    assert all("keeps 1 item of 2" in found for found in ranks.found("pipeline-own"))


def test_frameworks_accelerate_is_silent_on_one_rank(tmp_path: Path, server: RankServer) -> None:
    """It wraps nothing then, whatever dispatch_batches says."""
    ranks = fork_ranks(server, ACCELERATE, tmp_path, ranks=1)
    for case in ("default", "dispatch", "own"):
        for workers in (0, 2):
            ranks.check(f"{case}-{workers}", times=2)
            assert not ranks.said(f"{case}-{workers}")
    for case in ("spawn", "unshuffled", "pipeline-0", "pipeline-own"):
        ranks.check(case)
        assert not ranks.said(case)


BEGUN = """
from accelerate import Accelerator
from torch.utils.data.datapipes.iter import IterableWrapper

if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    labels = IterableWrapper(range(100)).sharding_filter()
    loader = accelerator.prepare(DataLoader(labels.zip(pipe_of()), batch_size=1, num_workers=2))
    print(list(loader))
"""


def test_frameworks_accelerate_ends_in_all_ranks_when_it_is_an_error(tmp_path: Path) -> None:
    """The ranks that wait for rank 0 end with it."""
    status, ranks = run_torchrun(BEGUN, tmp_path)
    assert status not in (0, None)
    assert "DivisionError" in ranks.stderr
    assert "had already begun to divide them" in ranks.stderr


TRAINER = """
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, numbers, labels=None):
        self.seen += numbers.tolist()
        return {"loss": (self.weight * numbers).mean()}

def collate(numbers):
    return {"numbers": torch.tensor(numbers)}

def epoch_of(steps, workers):
    model = Model()
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=1, max_steps=steps, use_cpu=True, report_to=[], save_strategy="no",
        dataloader_num_workers=workers, remove_unused_columns=False, logging_strategy="no", disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=pipe_of(), data_collator=collate).train()
    return model.seen

def main():
    for workers in (0, 2):
        note(f"trainer-{workers}", lambda: epoch_of(len_of // int(os.environ.get("WORLD_SIZE", 1)), workers))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_frameworks_trainer_loses_nothing(ranks: int, tmp_path: Path, server: RankServer) -> None:
    """A Trainer prepares a bare train_dataset by Accelerate."""
    pytest.importorskip("transformers")
    run = fork_ranks(server, f"len_of = {COUNT}\n{TRAINER}", tmp_path, ranks)
    for workers in (0, 2):
        run.check(f"trainer-{workers}")
        assert ("get_train_dataloader" in run.said(f"trainer-{workers}")) == (ranks == 2)


LIGHTNING = """
import lightning

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

    def training_step(self, numbers, _):
        self.seen += numbers.tolist()
        return (self.weight * numbers).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

def epoch_of(workers):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )
    trainer.fit(model, DataLoader(pipe_of(), batch_size=2, num_workers=workers))
    return model.seen

if __name__ == "__main__":
    for workers in (0, 2):
        note(f"lightning-{workers}", lambda: epoch_of(workers))
"""


def test_frameworks_lightning_is_silent_on_two_ranks(tmp_path: Path, server: RankServer) -> None:
    """It leaves iterable datasets to torch, which divides the pipe among ranks and workers."""
    pytest.importorskip("lightning")
    ranks = fork_ranks(server, LIGHTNING, tmp_path, sizes=EQUAL)
    for workers in (0, 2):
        found = ranks.found(f"lightning-{workers}")
        assert Counter(chain(*found)) == dict.fromkeys(set(chain(*found)), 2)
        assert len(set(chain(*found))) == sum(EQUAL)
        assert not ranks.said(f"lightning-{workers}")
