"""The manual's loader for Megatron-LM, driven as Megatron's training loop drives an external one."""

from pathlib import Path

import pytest

from tests.kits.framework_kit import check_epochs, example, make_shards
from tests.kits.ranks import ranks_of

pytestmark = pytest.mark.slow

#: What the provider imports, for a mesh of (dp, tp); and a loop that reads, broadcasts and saves as Megatron's does.
MEGATRON = """
import argparse, functools, os, sys, types, warnings
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.kits.ranks import run_ranks


def install(mesh, args):
    dp, tp = mesh["dp"], mesh["tp"]

    def get_checkpoint_name(path, iteration, tensor_rank=None, pipeline_rank=None, basename="model_optim_rng.pt"):
        rank = tp.get_local_rank() if tensor_rank is None else tensor_rank
        return os.path.join(path, f"iter_{iteration:07d}", f"mp_rank_{rank:02d}", basename)

    modules = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.parallel_state": {
            "get_data_parallel_group": dp.get_group,
            "get_data_parallel_rank": dp.get_local_rank,
            "get_tensor_model_parallel_rank": tp.get_local_rank,
        },
        "megatron.training": {"get_args": lambda: args},
        "megatron.training.checkpointing": {"get_checkpoint_name": get_checkpoint_name},
    }
    for name, members in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(members)
    sys.modules["megatron.core"].parallel_state = sys.modules["megatron.core.parallel_state"]
    return get_checkpoint_name


class RerunDataIterator:
    def __init__(self, iterable):
        self.iterable = iterable

    def __next__(self):
        return next(self.iterable)


class Training:
    def __init__(self, mesh, args):
        self.mesh, self.args = mesh, args
        self.checkpoint_name = install(mesh, args)
        self.is_first = mesh["tp"].get_local_rank() == 0
        external = None
        if getattr(train_valid_test_dataloaders_provider, "is_distributed", False) or self.is_first:
            external, _, _ = train_valid_test_dataloaders_provider([1000, 0, 0])
        assert (external is not None) == self.is_first
        self.iterator = None if external is None else RerunDataIterator(external)

    def next_batch(self):
        batch = [None]
        if self.is_first:
            read = next(self.iterator)
            batch = [list(zip(read["label"].tolist(), read["pad"].tolist()))]
        group = self.mesh["tp"].get_group()
        dist.broadcast_object_list(batch, src=dist.get_process_group_ranks(group)[0], group=group)
        return batch[0]

    def save(self):
        if not self.is_first:
            return
        state = self.iterator.iterable.save_state()
        name = f"train_dataloader_dprank{self.mesh['dp'].get_local_rank():03d}.pt"
        path = self.checkpoint_name(self.args.dataloader_save, self.args.iteration, basename=name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"dataloader_state_dict": state}, path)

    def train(self, save_iterations=()):
        batches = []
        while self.args.iteration < 21:
            batches.append(self.next_batch())
            self.args.iteration += 1
            if self.args.iteration in save_iterations:
                self.save()
        if self.is_first:
            self.iterator.iterable.loader.shutdown()
        return batches
"""

RUNS = """
def run(world, workers, rank):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    args = extra_args_provider(argparse.ArgumentParser()).parse_args(["--dataloader-save", "loader"])
    args.num_workers, args.seed, args.iteration = workers, 1234, 0
    iterations = 4, 9, 10, 13
    whole = Training(mesh, args).train(iterations)
    resumed = {}
    for iteration in iterations:
        args.iteration = iteration
        resumed[iteration] = Training(mesh, args).train()
    return whole, resumed



if __name__ == "__main__":
    folder, world, workers = sys.argv[1], *map(int, sys.argv[2:])
    os.chdir(folder)
    run_ranks(functools.partial(run, world, workers), folder, world)
"""


@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 0)])
def test_run_resumes_with_the_next_batch_when_its_iterator_saves_its_state(
    world: int, workers: int, tmp_path: Path
) -> None:
    """In the middle of two epochs and at the end of one; of 2 x 2 ranks, only the first of each replica reads."""
    make_shards(tmp_path)
    script = example("Megatron-LM") + MEGATRON + RUNS
    found = ranks_of(script, tmp_path, str(world), str(workers), world=world, seconds=150)
    if world == 4:
        assert found[0] == found[1]
        assert found[2] == found[3]
    check_epochs([found[0][0], found[-1][0]], workers)
    for whole, resumed in found:
        assert resumed == {iteration: whole[iteration:] for iteration in (4, 9, 10, 13)}
