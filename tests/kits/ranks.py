"""Scripts that run as the ranks of a gloo group, and what each of them has found."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.kits.workers_kit import run_script


def ranks_of(script: str, folder: Path, *arguments: str, world: int = 2, seconds: int = 90) -> list[Any]:
    """Runs a script that calls `run_ranks` with its first argument, a folder; gives what each rank returned."""
    done = run_script(script, str(folder), *arguments, seconds=seconds)
    assert done.returncode == 0, done.stderr
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(world)]


def run_ranks(work: Callable[[int], Any], folder: str, world: int = 2) -> None:
    """Calls a function in each rank, with the rank."""
    mp.start_processes(_run, (work, folder, world), nprocs=world, start_method="fork")


def _run(rank: int, work: Callable[[int], Any], folder: str, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = work(rank)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
