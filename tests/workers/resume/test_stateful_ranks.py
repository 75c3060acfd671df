"""StatefulPipeline on several ranks: those of one model replica read the same data."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits.replicas import check_replicas, replicas_in
from tests.kits.resume_kit import SMALL, indexed_shards_in, keys_of, plain
from tests.kits.shards import text_keys
from tests.kits.torchdata import needs_torchdata
from torchdata_wds import StatefulPipeline
from torchdata_wds.process_place import Place

KEYS = text_keys(SMALL)


@pytest.mark.slow
@needs_torchdata
@pytest.mark.parametrize(("workers", "ranks_by"), [(0, "group"), (2, "mesh")])
def test_ranks_of_a_replica_read_the_same_when_their_data_parallel_group_is_given(
    workers: int, ranks_by: str, tmp_path: Path
) -> None:
    """2 x 2 gloo ranks: two that share a place have equal items and states, and the others the rest of each epoch."""
    check_replicas(replicas_in(tmp_path, "StatefulPipeline", ranks_by, workers), workers)


@pytest.mark.slow
@needs_torchdata
@pytest.mark.parametrize(("workers", "context"), [(0, "fork"), (1, "fork"), (1, "spawn")])
def test_ranks_divide_the_work_when_none_are_given(workers: int, context: str, tmp_path: Path) -> None:
    """Spawned workers are not in a group, and the environment does not name the ranks."""
    check_replicas(replicas_in(tmp_path, "StatefulPipeline", "auto", workers, context, ["plain"]), workers)


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
