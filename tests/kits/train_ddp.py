"""Trains a model on shards with DistributedDataParallel. A run that is killed goes on where it was.

Example:
    torchrun --nproc-per-node 2 train_ddp.py --shards 'train-{000000..000007}.tar' --state-dir states --resume

All ranks take the same number of steps, each sample counts once per epoch, and the weights after a kill and a resume
are those of a run that was never killed. The number of ranks and workers must stay the same for that.
"""

import argparse
import json
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsLoader, index_shard, wds_collate
from torchdata_wds.format.index.sidecars import local_index

CROP, CLASSES = 8, 10

logger = logging.getLogger(__name__)


def list_shards(args: argparse.Namespace) -> Any:
    return IterableWrapper([args.shards]).list_shards()


def make_pipe(args: argparse.Namespace) -> Any:
    """Batches, as many of the same sizes in each worker of each rank: a few samples come twice to make that even."""
    shards = list_shards(args).shuffle().split_shards(index=args.index or True, even="pad")
    samples = shards.load_wds_shards().group_by_key().wds_shuffle(1000).wds_decode("torchrgb")
    # Random functions stand behind the shuffle: there they need not run for samples that a resumed epoch skips.
    return samples.wds_map(prepare).batch(args.batch_size).collate(wds_collate)


def prepare(sample: dict[str, Any]) -> dict[str, Any]:
    """Crops and flips an image at random, with torch's generator, which is seeded for each batch in each worker."""
    image = sample["png"]
    top, left = (int(torch.randint(size - CROP + 1, ())) for size in image.shape[1:])
    image = image[:, top : top + CROP, left : left + CROP]
    image = image.flip(2) if torch.rand(()) < 0.5 else image
    # Only samples that come for the second time have the field. Batches need it in all.
    return {"key": sample["__key__"], "image": image, "label": sample["cls"], "pad": sample.get("__pad__", False)}


def mean_loss(losses: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean over the real samples of all ranks. DDP divides gradients by the number of ranks."""
    count = is_real.sum()
    dist.all_reduce(count)
    return (losses * is_real).sum() / count.clamp(min=1) * dist.get_world_size()


def train(args: argparse.Namespace) -> None:
    rank = dist.get_rank()
    state = newest_state(args.state_dir, rank) if args.resume else None
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(3 * CROP**2, CLASSES)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # After its first step DDP adds up in another order. If that step counted, a resumed run of three or more ranks
    # would differ from an unbroken one in the last bits.
    model(torch.zeros(1, 3, CROP, CROP)).sum().backward()
    torch.manual_seed(args.seed + rank)  # dropout differs between ranks
    loader = WdsLoader(make_pipe(args), args.workers, seed=args.seed, timeout=args.timeout)
    first = step = 0
    if state is not None:
        loader.load_state_dict(state["loader"])  # also at the end of an epoch: then no batch is left
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        first, step = state["epoch"], state["step"]
    with loader:
        for epoch in range(first, args.epochs):
            for batch in loader:
                losses = nn.functional.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
                optimizer.zero_grad()
                mean_loss(losses, ~batch["pad"]).backward()
                optimizer.step()
                step += 1
                note_keys(args.state_dir / f"keys-{rank}.jsonl", epoch, step, batch)
                if step % args.save_every == 0:
                    state = {"epoch": epoch, "step": step, "loader": loader.state_dict(), "rng": torch.get_rng_state()}
                    state.update(model=model.module.state_dict(), optimizer=optimizer.state_dict())
                    save_state(args.state_dir, rank, state)
    if rank == 0:
        save(model.module.state_dict(), args.state_dir / "model.pt")


def note_keys(path: Path, epoch: int, step: int, batch: dict[str, Any]) -> None:
    """Writes down what was trained on. A step that comes again after a resume replaces the one before."""
    keys = [key for key, pad in zip(batch["key"], batch["pad"].tolist(), strict=True) if not pad]
    with path.open("a") as file:
        file.write(json.dumps({"epoch": epoch, "step": step, "size": len(batch["key"]), "keys": keys}) + "\n")


def save(content: dict[str, Any], path: Path) -> None:
    """A file is whole or not there, also when the machine goes down."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    save(state, folder / f"step-{state['step']:09d}-rank-{rank}.pt")
    # No rank is ahead of another by a whole state, since each step waits for all: two are enough to have one in common.
    for path in sorted(folder.glob(f"step-*-rank-{rank}.pt"))[:-2]:
        path.unlink()


def newest_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """The newest state that all ranks have saved, if there is one."""
    paths = {int(path.name.split("-")[1]): path for path in folder.glob(f"step-*-rank-{rank}.pt")}
    saved: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(saved, set(paths))
    step = max(set.intersection(*saved), default=0)
    for newer in [number for number in paths if number > step]:
        paths.pop(newer).unlink()
    logger.info("rank %d goes on behind step %d", rank, step)
    return torch.load(paths[step], weights_only=True) if step else None


def prepare_folder(args: argparse.Namespace) -> None:
    """Checks the folder, and makes the index of each shard that has none: better done once, when shards are written."""
    args.state_dir.mkdir(parents=True, exist_ok=True)
    if not args.resume and any(args.state_dir.glob("step-*.pt")):
        raise FileExistsError(f"{args.state_dir} has states of another run: pass --resume, or another --state-dir")
    for url in [] if args.index or dist.get_rank() else list_shards(args):
        if local_index(url) is None:
            index_shard(url)
    dist.barrier()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", required=True, help="pattern of shards with a png and a cls")
    parser.add_argument("--index", help="JSON file with the numbers of samples of the shards; else their own indexes")
    parser.add_argument("--state-dir", required=True, type=Path, help="where each rank keeps its last two states")
    parser.add_argument("--resume", action="store_true", help="go on from the newest state, if there is one")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--workers", type=int, default=2, help="of each rank")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one state to the next")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=120, help="seconds to wait for another rank, or for a batch")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    logging.basicConfig(level=logging.INFO)
    args = parse(arguments)
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    try:
        prepare_folder(args)
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
