"""Accelerate: killed and resumed from its checkpoints, a run sees the batches of an unbroken run."""

import json
from collections.abc import Iterator
from pathlib import Path

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

KILLED = """
class Noting(Model):
    def forward(self, batch):
        self.note(batch["label"], batch["pad"])
        return (self.scores(batch["image"]) * batch["label"] * ~batch["pad"]).mean()

phase, workers = sys.argv[1:]
model = Noting(f"{phase}-{os.environ['RANK']}.jsonl", 13 if phase == "killed" else None)
train(model, "whole" if phase == "whole" else "broken", int(workers))
print(model.layer.weight.sum().item())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[RankServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        with RankServer("accelerate") as server:
            yield server


@pytest.mark.parametrize("workers", [0, 2])
def test_two_ranks_resume_with_the_next_batch_when_they_were_killed(
    tmp_path: Path, workers: int, server: RankServer
) -> None:
    """A loader that prepare() leaves unchanged has its position in the checkpoint: the manual's example.

    The run is killed in its second epoch, three batches after the last checkpoint.
    """
    make_shards(tmp_path)
    run_killed(server, example("Accelerate") + RECORDING_MODEL + KILLED, tmp_path, str(workers))
    check_joined(tmp_path, saved=10, killed=13)


CASES = """
import json
from accelerate.utils import DistributedType

accelerator = Accelerator()
loader, model = WdsLoader(train_pipe(), seed=1), torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
found = {"is_unchanged": prepared is loader, "batches": len(loader), "gathered": [], "synced": [], "joined": []}
for batch in loader:
    labels, pad = accelerator.gather_for_metrics((batch["label"], batch["pad"]))
    found["gathered"] += labels[~pad].tolist()

accelerator.gradient_accumulation_steps = 2
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).sum())
            found["synced"].append(accelerator.sync_gradients)

accelerator.state.distributed_type = DistributedType.MULTI_GPU  # elsewhere it joins nothing
with accelerator.join_uneven_inputs([model], even_batches=False):
    for number in WdsLoader(IterableWrapper(range(7)).sharding_filter(), seed=1):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        found["joined"].append(number)
print(json.dumps(found))
"""


def test_tools_of_accelerate_work_with_a_loader_that_it_does_not_know(tmp_path: Path, server: RankServer) -> None:
    """Metrics without repeated samples, accumulated steps and ranks of uneven length, as in the manual."""
    make_shards(tmp_path)
    done = server.launch(example("Accelerate") + CASES, tmp_path)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    found = [json.loads(rank.stdout) for rank in done]
    assert [one.pop("joined") for one in found] == [[0, 2, 4, 6], [1, 3, 5]]
    assert found[0] == found[1]
    assert found[0]["is_unchanged"]
    assert sorted(found[0]["gathered"]) == list(range(sum(SIZES)))
    assert found[0]["batches"] % 2 == 1
    assert found[0]["synced"] == [False, True] * found[0]["batches"]
