"""The Trainer of transformers: killed and resumed from its checkpoints, it sees the batches of an unbroken run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.framework_kit import (
    RECORDING_MODEL,
    SIZES,
    RankServer,
    check_joined,
    example,
    make_shards,
    run_killed,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with RankServer("accelerate", "transformers.trainer") as server:
        yield server


TRAINER = (
    RECORDING_MODEL
    + """
from transformers import TrainingArguments

class Noting(Model):
    def forward(self, pixel_values, labels, pad):
        self.note(labels, pad)
        scores = self.scores(pixel_values)
        return {"loss": (scores * labels * ~pad).mean(), "logits": scores}

def arguments_of(folder, ignore_data_skip=True, **options):
    return TrainingArguments(
        folder, num_train_epochs=2, use_cpu=True, report_to=[], disable_tqdm=True, ignore_data_skip=ignore_data_skip,
        **options,
    )
"""
)
KILLED = """
phase, workers, options = sys.argv[1:]
model = Noting(f"{phase}-{os.environ['RANK']}.jsonl", 16 if phase == "killed" else None)
arguments = arguments_of("whole" if phase == "whole" else "broken", **json.loads(options))
fine_tune(model, arguments, int(workers))
print(model.layer.weight.sum().item())
"""


@pytest.mark.parametrize(
    ("workers", "saved", "options"),
    [(0, 9, {"save_strategy": "epoch"}), (2, 12, {"save_steps": 3, "gradient_accumulation_steps": 2})],
)
def test_two_ranks_resume_with_the_next_batch_when_they_were_killed(
    tmp_path: Path, workers: int, saved: int, options: dict[str, Any], server: RankServer
) -> None:
    """Two ranks of a Trainer, which lost half of an epoch when it divided the pipe again: the manual's example.

    The checkpoint is that after the first epoch, or one in the middle of the second.
    """
    make_shards(tmp_path)
    run_killed(server, example("HF Trainer") + TRAINER + KILLED, tmp_path, str(workers), json.dumps(options))
    check_joined(tmp_path, saved, killed=16)


EVALUATED = """
class Evaluating(WdsTrainer):
    def get_eval_dataloader(self, eval_dataset=None):
        return WdsLoader(train_pipe().map(to_inputs), 2, seed=1)

def compute_metrics(evaluation):
    labels, pad = evaluation.label_ids
    return {"labels": labels[~pad].tolist()}

arguments = arguments_of("out", label_names=["labels", "pad"])
trainer = Evaluating(Noting(), arguments, compute_metrics=compute_metrics)
print("\\n" + json.dumps(trainer.evaluate()["eval_labels"]))
"""


def test_evaluation_has_each_sample_once_on_two_ranks(tmp_path: Path, server: RankServer) -> None:
    """Without those that even="pad" repeats."""
    make_shards(tmp_path)
    for rank in server.launch(example("HF Trainer") + TRAINER + EVALUATED, tmp_path):
        assert rank.returncode == 0, rank.stderr
        assert sorted(json.loads(rank.stdout.splitlines()[-1])) == list(range(sum(SIZES)))


REFUSED = """
def trainer_of(loader, **options):
    trainer = WdsTrainer(Noting(), arguments_of("out", **options))
    trainer.loader = loader
    return trainer

trainer_of(WdsLoader(train_pipe().map(to_inputs), seed=1), max_steps=4, save_steps=4).train()
again = trainer_of(WdsLoader(train_pipe().map(to_inputs), seed=1), ignore_data_skip=False)
unsized = trainer_of(WdsLoader(train_pipe().filter(bool).map(to_inputs), seed=1))
said = []
for run in (lambda: again.train(resume_from_checkpoint="out/checkpoint-4"), unsized.train):
    try:
        run()
    except (AttributeError, ValueError) as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_trainer_fails_when_it_would_skip_batches_itself_or_knows_no_length(tmp_path: Path, server: RankServer) -> None:
    """Before it has taken a batch, so that nothing is lost."""
    make_shards(tmp_path)
    (rank,) = server.launch(example("HF Trainer") + TRAINER + REFUSED, tmp_path, world=1)
    assert rank.returncode == 0, rank.stderr
    skipping, unsized = json.loads(rank.stdout.splitlines()[-1])
    assert "has no attribute 'dataset'" in skipping
    assert "max_steps" in unsized
