"""The figures of all ranks, gathered on each of them."""

from pathlib import Path

import pytest

from tests.kits.ranks import ranks_of

# An all-reduce in each step makes the fast rank wait for the slow one, in its step.
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
from torch.utils.data.datapipes.iter import IterableWrapper
from tests.kits.ranks import run_ranks
from torchdata_wds import WdsLoader

def slow(item):
    time.sleep(0.04 if dist.get_rank() else 0.001)
    return item

def work(rank):
    loader = WdsLoader(IterableWrapper(range(80)).sharding_filter().wds_map(slow))
    for _ in loader:
        dist.all_reduce(torch.zeros(1))
    found = loader.stats(all_ranks=True)
    return [(stats.rank, stats.total.items) for stats in found], found.report()

if __name__ == "__main__":
    run_ranks(work, sys.argv[1])
"""


@pytest.mark.slow
def test_slow_rank_is_named_when_the_others_wait_for_it(tmp_path: Path) -> None:
    """All ranks get the same report."""
    (found, report), other = ranks_of(SCRIPT, tmp_path)
    assert found == [(0, 40), (1, 40)]
    assert (found, report) == other
    assert "Rank 1: The training loop waits" in report
    assert "wds_map(slow)" in report.partition("Rank 1")[2]
    assert [line.split()[0] for line in report.splitlines() if line[:1].isdigit()] == ["0", "1"]
