"""StatefulPipeline on several ranks: those of one model replica read the same data."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.ranks import ranks_of
from tests.kits.resume_kit import SMALL, in_epochs, indexed_shards_in, keys_of, left_of, plain, resampled, split
from tests.kits.shards import text_keys
from tests.kits.torchdata import needs_torchdata
from torchdata_wds import StatefulPipeline
from torchdata_wds.consumers import Place

RANKS = """
import json, sys, warnings
warnings.filterwarnings("ignore", "'set_vital' is deprecated")
warnings.filterwarnings("ignore", "This DataLoader will create")
from torch.distributed.device_mesh import init_device_mesh
from tests.kits.ranks import run_ranks
from tests.kits.resume_kit import GRAPHS
from tests.workers.resume.test_stateful import as_it_is
from torchdata_wds import StatefulPipeline

folder, urls, names, workers, context, is_mesh = sys.argv[1], *map(json.loads, sys.argv[2:])

def loader_of(name, ranks):
    pipeline = StatefulPipeline(GRAPHS[name](urls), seed=3, ranks=ranks)
    options = {"multiprocessing_context": context, "persistent_workers": True} if workers else {}
    return StatefulDataLoader(pipeline, batch_size=None, num_workers=workers, collate_fn=as_it_is, **options)

def state_of(loader):
    state = loader.state_dict()
    state = state["_snapshot"]["_worker_snapshots"]["worker_0"] if workers else state
    return state["dataset_state"]

def run(rank):
    ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"] if is_mesh else "auto"
    found = {}
    for name in names:
        loader = loader_of(name, ranks)
        first = list(loader)
        if context == "spawn":  # is slow to start
            found[name] = first
            continue
        again = iter(loader)
        begun = [next(again) for _ in range(2)]
        state, inside = loader.state_dict(), state_of(loader)
        epochs = [first, begun + list(again)]
        loader = loader_of(name, ranks)
        loader.load_state_dict(json.loads(json.dumps(state)))
        found[name] = epochs, inside, list(loader)
    return found

if __name__ == "__main__":
    run_ranks(run, folder, 4 if is_mesh else 2)
"""

KEYS = text_keys(SMALL)


@pytest.mark.slow
@needs_torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_replica_read_the_same_when_a_dimension_of_the_mesh_is_given(workers: int, tmp_path: Path) -> None:
    """2 x 2 gloo ranks: two that share a place have equal items and states, and the others the rest of each epoch."""
    names = [graph.__name__ for graph in (plain, split, in_epochs, resampled)]
    arguments = map(json.dumps, (indexed_shards_in(tmp_path), names, workers, "fork", True))
    found = ranks_of(RANKS, tmp_path, *arguments, world=4)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for name in names:
        (one, state, rest), (two, other_state, other_rest) = found[0][name], found[2][name]
        assert state != other_state
        assert [[rest], [other_rest]] == [left_of(one, 1, 2, 0), left_of(two, 1, 2, 0)]
        for epochs in zip(one, two, strict=True):
            mine, yours = map(keys_of, epochs)
            if name == "plain":
                assert sorted(mine + yours) == sorted(KEYS)
            elif name == "split":  # each consumer leaves at most one sample
                assert len(mine) == len(yours) > len(KEYS) / 2 - max(workers, 1)
                assert len({*mine, *yours}) == len(mine + yours)
            else:
                assert len(mine) == len(yours) == (13 if name == "in_epochs" else 12)
                assert mine != yours
            assert one[0] != one[1]


@pytest.mark.slow
@needs_torchdata
@pytest.mark.parametrize(("workers", "context"), [(0, "fork"), (1, "fork"), (1, "spawn")])
def test_ranks_divide_the_work_when_none_are_given(workers: int, context: str, tmp_path: Path) -> None:
    """Spawned workers are in no group, and nothing in the environment tells them of the ranks."""
    arguments = map(json.dumps, (indexed_shards_in(tmp_path), ["plain"], workers, context, False))
    one, two = (found["plain"] for found in ranks_of(RANKS, tmp_path, *arguments))
    for epochs in [(one, two)] if context == "spawn" else zip(one[0], two[0], strict=True):
        assert sorted(keys_of(epochs[0]) + keys_of(epochs[1])) == sorted(KEYS)


def test_ranks_are_a_pair_of_numbers_when_there_is_no_group(tmp_path: Path) -> None:
    """Every place has its share; the state says whose it is."""
    urls = indexed_shards_in(tmp_path)
    shares = [list(StatefulPipeline(plain(urls), seed=3, ranks=(rank, 3))) for rank in range(3)]
    assert sorted(key for share in shares for key in keys_of(share)) == sorted(KEYS)
    pipeline = StatefulPipeline(plain(urls), seed=3, ranks=(2, 3))
    items = iter(pipeline)
    begun = [next(items)]
    assert begun + list(items) == shares[2]
    assert pipeline.ranks == Place(3, 2)
    other = StatefulPipeline(plain(urls), seed=3, ranks=(1, 3))
    other.load_state_dict(pipeline.state_dict())
    with pytest.raises(ValueError, match="Differences: rank: 2 then, 1 now"):
        iter(other)


@pytest.mark.parametrize(
    ("ranks", "error", "message"),
    [
        ((3, 3), ValueError, r"ranks=\(3, 3\) must be \(rank, size\)"),
        ("all", TypeError, "ranks must be 'auto'"),
        (None, TypeError, "ranks must be 'auto'"),
        (4, TypeError, "ranks must be 'auto'"),
    ],
)
def test_ranks_are_refused_when_they_are_no_place(
    ranks: Any, error: type[Exception], message: str, tmp_path: Path
) -> None:
    """When the object is made."""
    with pytest.raises(error, match=message):
        StatefulPipeline(plain(indexed_shards_in(tmp_path)), ranks=ranks)
