"""WdsLoader and the service on several ranks, whose data-parallel groups are given; StatefulPipeline is in resume/."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import open_files
from tests.kits.ranks import ranks_of, run_ranks
from tests.kits.replicas import check_replicas, loader_of, replicas_in, shut_down
from tests.kits.shards import sample_members, write_tar
from tests.kits.torchdata import needs_torchdata
from torchdata_wds import WdsLoader, index_shard

KINDS = ["WdsLoader", pytest.param("WorkersReadingService", marks=needs_torchdata)]


# ------------------------------------------------------------------------------------------------ data-parallel groups
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers", "ranks_by"),
    [
        ("WdsLoader", 2, "group"),
        pytest.param("WorkersReadingService", 2, "group", marks=needs_torchdata),
        pytest.param("WorkersReadingService", 0, "mesh", marks=needs_torchdata),
    ],
)
def test_ranks_of_a_replica_read_the_same_when_their_data_parallel_group_is_given(
    kind: str, workers: int, ranks_by: str, tmp_path: Path
) -> None:
    """2 x 2 gloo ranks: two that share a place have equal items and states, and the others the rest of each epoch."""
    check_replicas(replicas_in(tmp_path, kind, ranks_by, workers), workers)


@pytest.mark.slow
def test_spawned_workers_read_for_the_place_of_their_rank(tmp_path: Path) -> None:
    """They are not in a group, and know only what their rank has passed them."""
    check_replicas(replicas_in(tmp_path, "WdsLoader", "auto", 1, "spawn", ["padded"]), 1)


WITHOUT_GLOO = """
import sys
from tests.workers.test_ranks import run_without_gloo

if __name__ == "__main__":
    run_without_gloo(*sys.argv[1:])
"""


def run_without_gloo(folder: str) -> None:
    """Makes loaders in two ranks whose backend takes no tensors of the CPU."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")

    def run(_: int) -> list[Any]:
        dist.get_backend_config = lambda *_: "cuda:nccl"
        found = []
        for _ in range(3):
            items = list(WdsLoader(IterableWrapper(NUMBERS).shuffle().sharding_filter()))
            found.append((items, open_files()))
        return found

    run_ranks(run, folder)


@pytest.mark.slow
def test_forgotten_loaders_leave_no_groups_in_which_seeds_are_shared(tmp_path: Path) -> None:
    """A program may make one for each evaluation; each group would hold threads and connections."""
    found = ranks_of(WITHOUT_GLOO, tmp_path)
    for (first, _), (second, _) in zip(*found, strict=True):
        assert sorted(first + second) == NUMBERS
    for rank in found:
        assert max(files for _, files in rank) <= rank[0][1]


GROUPS = """
import sys
from tests.workers.test_ranks import run_groups

if __name__ == "__main__":
    run_groups(*sys.argv[1:])
"""

NUMBERS = list(range(23))


def run_groups(folder: str, kind: str) -> None:
    """Tries groups of all sizes in four ranks."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")

    def items_of(ranks: Any, seed: int | None) -> list[int] | str:
        loader = loader_of(kind, IterableWrapper(NUMBERS).shuffle().sharding_filter(), ranks, 0, "fork", seed)
        try:
            return list(loader)
        except RuntimeError as error:
            return str(error)
        finally:
            shut_down(loader)

    def run(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        own, _ = dist.new_subgroups(1)
        first = dist.new_group([0])
        found = {
            "world, unseeded": items_of(dist.group.WORLD, None),
            "flattened, unseeded": items_of(mesh["replicate", "shard"]._flatten("dp"), None),
            "half, unseeded": items_of(mesh["shard"], None),
            "single, unseeded": items_of(own, None),
            "single": items_of(own, 7),
        }
        half = DeviceMesh("cpu", [0, 1])
        for name, ranks in (("outsider", first), ("outsider of a mesh", half), ("whole mesh", mesh)):
            try:
                found[name] = items_of(ranks, 7)
            except ValueError as error:
                found[name] = str(error)
        return found

    run_ranks(run, folder, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_every_size_are_divided_or_refused(kind: str, tmp_path: Path) -> None:
    """All ranks agree on a seed among themselves; a smaller group must be given one."""
    found = ranks_of(GROUPS, tmp_path, kind, world=4)
    for name in ("world, unseeded", "flattened, unseeded"):
        shares = [one[name] for one in found]
        assert sorted(number for share in shares for number in share) == NUMBERS
        assert {len(share) for share in shares} == {5, 6}
    for one in found:
        assert "they cannot agree on a seed among themselves: pass the same seed=" in one["half, unseeded"]
        assert "has place 0 of 1 ranks" in one["single, unseeded"]
        assert one["single"] == found[0]["single"] != NUMBERS
        assert sorted(one["single"]) == NUMBERS
        assert "takes one dimension of a DeviceMesh, not all of ('replicate', 'shard')" in one["whole mesh"]
    assert found[0]["outsider"] == found[0]["single"]
    assert all("a process group that this process does not belong to" in one["outsider"] for one in found[1:])
    assert sorted(found[0]["outsider of a mesh"] + found[1]["outsider of a mesh"]) == NUMBERS
    assert all("a DeviceMesh that this process does not belong to" in one["outsider of a mesh"] for one in found[2:])


# -------------------------------------------------------------------------------------------------- states on the disk
MANY = """
import sys
from tests.workers.test_ranks import run_many

if __name__ == "__main__":
    run_many(*sys.argv[1:])
"""


def samples(folder: str) -> Any:
    urls = sorted(map(str, Path(folder).glob("*.tar")))
    pipe = IterableWrapper(urls).shuffle().split_shards(index=True, even="pad").load_wds_shards().group_by_key()
    return pipe.wds_shuffle(50).map(marked_key).batch(8)


def marked_key(sample: dict[str, Any]) -> tuple[str, bool]:
    return sample["__key__"], "__pad__" in sample


def run_many(folder: str, shards: str, phase: str) -> None:
    """Writes states of a rank while it runs two epochs, or resumes from one of them in a new process."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")

    def run(rank: int) -> Any:
        with WdsLoader(samples(shards), 4, seed=1) as loader:
            if phase == "resume":
                found = {}
                for name in ("torch", "json"):
                    loader.load_state_dict(read(name, rank))
                    found[name] = [list(loader), list(loader)]
                return found
            epochs, sizes = [], []
            for epoch in range(2):
                items = []
                for item in loader:
                    items.append(item)
                    state = loader.state_dict()
                    torch.save(state, Path(folder, f"measured-{rank}"))
                    sizes.append(Path(folder, f"measured-{rank}").stat().st_size)
                    sizes.append(len(json.dumps(state)))
                    if epoch == 0 and len(items) == 20:
                        torch.save(state, Path(folder, f"torch-{rank}"))
                        Path(folder, f"json-{rank}").write_text(json.dumps(state))
                epochs.append(items)
            return epochs, max(sizes)

    def read(name: str, rank: int) -> Any:
        path = Path(folder, f"{name}-{rank}")
        return torch.load(path) if name == "torch" else json.loads(path.read_text())

    run_ranks(run, folder)


@pytest.mark.slow
def test_states_are_small_and_resume_from_files_when_two_ranks_have_four_workers(tmp_path: Path) -> None:
    """400 indexed shards; each of a rank's states is below 10 KB as torch.save and json write it."""
    sizes = [number * 7 % 5 for number in range(400)]
    for shard, size in enumerate(sizes):
        members = [member for key in range(size) for member in sample_members(f"{shard}-{key}", cls=b"1")]
        index_shard(write_tar(tmp_path / f"{shard:06d}.tar", members))
    keys = sorted(f"{shard}-{key}" for shard, size in enumerate(sizes) for key in range(size))
    folder = tmp_path / "states"
    folder.mkdir()
    whole = ranks_of(MANY, folder, str(tmp_path), "run", seconds=240)
    (folder / "rendezvous").unlink(missing_ok=True)
    resumed = ranks_of(MANY, folder, str(tmp_path), "resume", seconds=240)
    assert all(size < 10_000 for _, size in whole)
    for epoch in range(2):
        items = [item for epochs, _ in whole for batch in epochs[epoch] for item in batch]
        assert sorted(key for key, is_pad in items if not is_pad) == keys
    assert len(whole[0][0][0]) == len(whole[1][0][0])
    for (epochs, _), found in zip(whole, resumed, strict=True):
        assert found["torch"] == found["json"] == [epochs[0][20:], epochs[1]]
