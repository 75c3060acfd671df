"""Lightning's fit: killed and resumed from its checkpoints, a run sees the batches of an unbroken run."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.framework_kit import SIZES, RankServer, example, make_shards
from tests.kits.torchdata import needs_torchdata

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("lightning") as server:
        yield server


RECORDER = """
import json, os, signal, sys

import logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Recorder(Classifier):
    def __init__(self, file, kill_at=None, kill_by=signal.SIGKILL):
        super().__init__()
        self.kill_by = kill_by
        self.seen, self.kill_at = open(file, "w"), kill_at

    def training_step(self, batch):
        if self.trainer.global_step == self.kill_at:
            self.kill_at = None
            os.kill(os.getpid(), self.kill_by)
        real = [label for label, is_pad in zip(batch["label"].tolist(), batch["pad"].tolist()) if not is_pad]
        print(json.dumps([self.trainer.current_epoch, real]), file=self.seen, flush=True)
        return self.layer(batch["image"].flatten(1)).mean()
"""

KILLED = """
phase, workers = sys.argv[1:]
model = Recorder(f"{phase}-{os.environ['RANK']}.jsonl", 6 if phase == "first" else None)
fit(model, phase, "first/last.ckpt" if phase == "second" else None, int(workers))
"""


def batches(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_resume_with_the_next_batch_when_they_were_killed(
    tmp_path: Path, workers: int, server: RankServer
) -> None:
    """The manual's example, with shards of uneven sizes: the last checkpoint of the killed run was at step 5."""
    make_shards(tmp_path)
    script = example("Lightning") + RECORDER + KILLED
    for phase in ("whole", "first", "second"):
        for rank in server.launch(script, tmp_path, phase, str(workers)):
            assert rank.returncode == (-signal.SIGKILL if phase == "first" else 0), rank.stderr
    saved = torch.load(tmp_path / "first/last.ckpt", weights_only=True)["loops"]["fit_loop"]["state_dict"]
    assert [state["item"] for state in saved["combined_loader"][0]["ranks"]] == [5, 5]
    for rank in range(2):
        whole, first, second = (batches(tmp_path / f"{phase}-{rank}.jsonl") for phase in ("whole", "first", "second"))
        assert len(first) == 6
        assert first[:5] + second == whole
    joined = [batch for rank in range(2) for batch in batches(tmp_path / f"whole-{rank}.jsonl")]
    for epoch in range(2):
        assert sorted(label for number, real in joined for label in real if number == epoch) == list(range(sum(SIZES)))


def test_two_ranks_resume_with_the_next_batch_when_sigterm_ended_them(tmp_path: Path, server: RankServer) -> None:
    """The checkpoint that Lightning saves then holds the states of both; the step under way is finished first."""
    make_shards(tmp_path)
    code = example("Lightning").replace(
        "every_n_train_steps=5, save_last=True", "save_on_exception=True, filename='last'"
    )
    script = code + RECORDER + KILLED.replace("else None)", "else None, signal.SIGTERM)", 1)
    for phase in ("first", "second"):
        for rank in server.launch(script, tmp_path, phase, "0"):
            assert rank.returncode == 0, rank.stderr
    runs = [[batches(tmp_path / f"{phase}-{rank}.jsonl") for rank in range(2)] for phase in ("first", "second")]
    assert [len(run) for run in runs[0]] == [7, 7]
    for epoch in range(2):
        seen = sorted(
            label for run in runs for rank in run for number, real in rank for label in real if number == epoch
        )
        assert seen == list(range(sum(SIZES)))


ELASTIC = """
def ordered(batch):
    pipe = IterableWrapper(["train-{000000..000006}.tar"]).list_shards().load_in_order(index=True, even="pad")
    return pipe.wds_decode("torchrgb").wds_map(prepare).batch(batch).collate(wds_collate)

phase, resume_from, devices, batch, steps = sys.argv[1:]
with WdsLoader(ordered(int(batch)), seed=1) as loader:
    trainer = lightning.Trainer(
        max_epochs=2, max_steps=int(steps), accelerator="cpu", devices=int(devices), logger=False,
        strategy="ddp" if devices == "2" else "auto", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(phase, every_n_train_steps=1, save_last=True)],
    )
    trainer.fit(Recorder(f"{phase}-{trainer.global_rank}.jsonl"), loader, ckpt_path=resume_from or None)
"""


@pytest.mark.parametrize(("grids", "steps"), [(((2, 8), (1, 10)), 5), (((1, 10), (2, 3)), 4), (((1, 8), (2, 16)), 18)])
def test_global_order_resumes_on_other_devices_with_another_batch_size(
    grids: tuple[tuple[int, int], ...], steps: int, tmp_path: Path, server: RankServer
) -> None:
    """Though Lightning counts the batches of an epoch; in the middle of it, or after its last batch."""
    make_shards(tmp_path)
    script = example("Lightning") + RECORDER
    seen: list[Any] = []
    for phase, (devices, batch) in zip(("first", "second"), grids, strict=True):
        resume_from, last = ("", str(steps)) if phase == "first" else ("first/last.ckpt", "-1")
        arguments = (phase, resume_from, str(devices), str(batch), last)
        for rank in server.launch(script + ELASTIC, tmp_path, *arguments, world=devices):
            assert rank.returncode == 0, rank.stderr
        seen += [item for rank in range(devices) for item in batches(tmp_path / f"{phase}-{rank}.jsonl")]
    for epoch in range(2):
        assert sorted(label for number, real in seen for label in real if number == epoch) == list(range(sum(SIZES)))


CASES = """
import glob, shutil, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from torchdata_wds import StatefulPipeline, WdsLoader
FILES = sorted(glob.glob("train-*.tar"))

def plain_pipe(epoch=None):
    pipe = IterableWrapper(FILES).shuffle().sharding_filter().load_wds_shards().group_by_key().wds_shuffle(50)
    pipe = pipe.wds_decode("torchrgb").wds_map(prepare).batch(8)
    return (pipe if epoch is None else pipe.wds_epoch(epoch)).collate(wds_collate)

class Unsized(WdsLoader):
    def __len__(self):
        raise TypeError("the length is not known")

def dataloader2():
    from torchdata.dataloader2 import DataLoader2
    from torchdata_wds import WorkersReadingService
    return DataLoader2(train_pipe(), reading_service=WorkersReadingService(2, seed=1))

def stateful():
    from torchdata.stateful_dataloader import StatefulDataLoader
    pipe = StatefulPipeline(train_pipe(), seed=1)
    return StatefulDataLoader(pipe, batch_size=None, num_workers=2, persistent_workers=True)

LOADERS = {
    "sized": lambda: WdsLoader(train_pipe(), seed=1),
    "workers": lambda: WdsLoader(train_pipe(), 2, seed=1),
    "unsized": lambda: Unsized(plain_pipe(), seed=1),
    "unsized workers": lambda: Unsized(plain_pipe(), 2, seed=1),
    "length": lambda: WdsLoader(plain_pipe(), seed=1, length=18),
    "epoch": lambda: WdsLoader(plain_pipe(7), 2, seed=1),
    "DataLoader2": dataloader2,
    "StatefulPipeline": stateful,
}

class Failing(Recorder):
    def training_step(self, batch):
        if self.fails_at is not None and self.trainer.global_step == self.fails_at:
            raise ArithmeticError
        return super().training_step(batch)

    def validation_step(self, batch):
        self.validated = getattr(self, "validated", 0) + 1

def run(kind, name, resume_from=None, fails_at=None, epochs=3, saving=None, validates=False, **options):
    model = Failing(name)
    model.fails_at = fails_at
    callbacks = [] if saving is None else [ModelCheckpoint("saved", filename="{step}", save_top_k=-1, **saving)]
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, callbacks=callbacks, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=bool(callbacks), **options,
    )
    validation = WdsLoader(train_pipe(), seed=1) if validates else None
    try:
        trainer.fit(model, LOADERS[kind](), validation, ckpt_path=resume_from)
    except ArithmeticError:
        assert fails_at
    trainer.end_of_run = getattr(model, "validated", 0)
    return [json.loads(line) for line in open(name)]

for case, (kind, saved_at, options) in json.loads(sys.argv[1]).items():
    shutil.rmtree("saved", ignore_errors=True)
    fails_at = options.pop("fails_at", None)
    try:
        first = run(kind, "first", saving=options.pop("saving"), fails_at=fails_at, **options)
        whole = run(kind, "whole", **options) if fails_at else first
        second = run(kind, "second", f"saved/step={saved_at}.ckpt", **options)
    except Exception as error:
        print(json.dumps([case, repr(error), None]))
    else:
        print(json.dumps([case, whole, second]))
"""
STEP = {"every_n_train_steps": 1}
EPOCH = {"every_n_epochs": 1}
FAILING = {"saving": {**EPOCH, "save_on_exception": True}, "fails_at": 7}
VALIDATED = {"saving": {**EPOCH, "save_on_train_epoch_end": False}, "validates": True}
#: The loader, the step whose checkpoint is resumed, and options. An epoch has 18 batches.
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "in the middle of an epoch": ("sized", 5, {"saving": STEP}),
    "with workers": ("workers", 5, {"saving": STEP}),
    "without a length": ("unsized", 5, {"saving": STEP}),
    "without a length, with workers": ("unsized workers", 23, {"saving": STEP}),
    "at the last step of an epoch": ("workers", 18, {"saving": STEP}),
    "at the last step of an epoch without a length": ("unsized workers", 18, {"saving": STEP}),
    "after an epoch": ("workers", 18, {"saving": EPOCH}),
    "after an epoch without a length": ("unsized", 18, {"saving": EPOCH}),
    "after an epoch of wds_epoch": ("epoch", 7, {"saving": EPOCH}),
    "after a limited epoch": ("workers", 10, {"saving": EPOCH, "limit_train_batches": 10}),
    "in the middle of a limited epoch": ("unsized", 4, {"saving": STEP, "limit_train_batches": 10}),
    "after an exception": ("sized", 7, FAILING),
    "after an exception without a length": ("unsized", 7, FAILING),
    "after validation within an epoch": ("sized", 6, {"saving": STEP, "validates": True, "val_check_interval": 6}),
    "after validation at the end of an epoch": ("sized", 18, VALIDATED),
    "after validation at the end of an epoch without a length": ("unsized", 18, VALIDATED),
    "with a length": ("length", 5, {"saving": STEP}),
    "in DataLoader2": ("DataLoader2", 5, {"saving": STEP}),
    "in StatefulDataLoader": ("StatefulPipeline", 5, {"saving": STEP}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, server: RankServer) -> dict[str, tuple[Any, Any]]:
    """The batches of an unbroken and a resumed run of each kind."""
    folder = tmp_path_factory.mktemp("lightning")
    make_shards(folder)
    (done,) = server.launch(example("Lightning") + RECORDER + CASES, folder, json.dumps(KINDS), world=1, seconds=500)
    assert done.returncode == 0, done.stderr
    return {case: (whole, second) for case, whole, second in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=needs_torchdata if case.startswith("in DataL") else ()) for case in KINDS]
)
def test_run_resumes_with_the_next_batch_when_it_was_saved(case: str, runs: dict[str, tuple[Any, Any]]) -> None:
    """Lightning's checkpoints of one device, at every moment at which it saves them.

    DataLoader2 refused a state after ``iter()``, and a StatefulPipeline without a length lost the batch fetched ahead.
    """
    whole, second = runs[case]
    assert second is not None, whole
    assert second == whole[KINDS[case][1] :]
