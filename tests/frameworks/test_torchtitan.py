"""The manual's loader for torchtitan, driven as torchtitan's trainer and checkpointer drive theirs."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits.framework_kit import check_epochs, example, make_shards
from tests.kits.ranks import ranks_of

pytestmark = pytest.mark.slow

#: A trainer with the loop of torchtitan's; its checkpoints hold the trainer and its loader as Stateful objects.
TRAINER = """
import functools, os, sys, warnings
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
warnings.filterwarnings("ignore", "TypedStorage is deprecated")
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from tests.kits.ranks import run_ranks


class Trainer:
    def __init__(self, dp_rank, dp_world_size, workers):
        self.step = 0
        self.dataloader = TitanLoader(train_pipe(), dp_rank=dp_rank, dp_world_size=dp_world_size, num_workers=workers)
        self.states = {"train_state": self, "dataloader": self.dataloader}

    def state_dict(self):
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state_dict):
        self.step = state_dict["step"].item()

    def batches(self):
        for batch in iter(self.dataloader):
            yield list(zip(batch["label"].tolist(), batch["pad"].tolist()))

    def train(self, steps, load_step=None, save_steps=(), group=None):
        if load_step is not None:
            dcp.load(self.states, checkpoint_id=f"step-{load_step}")
            assert self.step == load_step
        iterator = self.batches()
        taken, saving = [], None
        while self.step < steps:
            taken.append(next(iterator))
            self.step += 1
            if self.step in save_steps and group is None:
                dcp.save(self.states, checkpoint_id=f"step-{self.step}")
            elif self.step in save_steps:
                if saving is not None:
                    saving.result()
                saving = dcp.async_save(self.states, checkpoint_id=f"step-{self.step}", process_group=group)
        if saving is not None:
            saving.result()
        state = self.dataloader.state_dict()
        self.dataloader.close()
        return taken, state
"""

RUNS = """
def run(mesh_size, workers, rank):
    mesh = init_device_mesh("cpu", (2, mesh_size // 2), mesh_dim_names=("dp", "tp"))["dp"]
    place = mesh.get_local_rank(), mesh.size()
    steps = (4, 9, 10, 13)
    group = dist.new_group(backend="gloo") if workers else None  # saves meanwhile
    whole, last = Trainer(*place, workers).train(21, save_steps=steps, group=group)
    resumed = {step: Trainer(*place, workers).train(21, load_step=step) for step in steps}
    return whole, last, resumed, refusals(place[0], workers)


def refusals(dp_rank, workers):
    found = []
    for place in (dp_rank, 3), (dp_rank + 1, 3):
        trainer = Trainer(*place, workers)
        try:
            trainer.train(21, load_step=4)
        except (ValueError, CheckpointException) as error:
            found.append(f"{type(error).__name__}: {error}")
        trainer.dataloader.close()
        dist.barrier()
    return found


if __name__ == "__main__":
    folder, world, workers = sys.argv[1], *map(int, sys.argv[2:])
    os.chdir(folder)
    run_ranks(functools.partial(run, world, workers), folder, world)
"""


@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 0)])
def test_run_resumes_with_the_next_batch_from_a_distributed_checkpoint(
    world: int, workers: int, tmp_path: Path
) -> None:
    """In the middle of two epochs and at the end of one; the 2 x 2 mesh has two tensor parallel ranks a replica."""
    make_shards(tmp_path)
    arguments = (str(world), str(workers))
    found = ranks_of(example("torchtitan") + TRAINER + RUNS, tmp_path, *arguments, world=world, seconds=150)
    if world == 4:
        assert found[0] == found[1]
        assert found[2] == found[3]
    places = [found[0], found[-1]]
    check_epochs([whole for whole, *_ in places], workers)
    for whole, last, resumed, refused in places:
        for step, (batches, state) in resumed.items():
            assert (batches, state) == (whole[step:], last), step
        assert "ranks: 2 then, 3 now" in refused[0]
        assert "Missing key in checkpoint state_dict: dataloader.dp_rank_2" in refused[1]


def test_state_has_one_key_for_each_place(tmp_path: Path) -> None:
    """Such a checkpoint keeps one value of equal keys: all data-parallel ranks need different ones."""
    space: dict[str, Any] = {}
    exec(example("torchtitan"), space)
    loaders = [space["TitanLoader"](space["train_pipe"](), rank, 3) for rank in range(3)]
    assert [list(loader.state_dict()) for loader in loaders] == [["dp_rank_0"], ["dp_rank_1"], ["dp_rank_2"]]
