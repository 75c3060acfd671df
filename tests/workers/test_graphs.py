"""Two gloo ranks of two workers each: every item once per epoch over all of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.ranks import ranks_of
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from tests.kits.workers_kit import SIZES, items_of, run_script, uneven_pipe
from torchdata_wds import handlers
from torchdata_wds.process_place import Place
from torchdata_wds.workers import ranks as ranks_module

RANKS = """
import json, logging, sys
import torch
from tests.kits.ranks import run_ranks
from tests.kits.workers_kit import SeedTeller, uneven_pipe
from torchdata_wds.workers.service import WorkersReadingService
from torchdata.dataloader2 import DataLoader2, DistributedReadingService, SequentialReadingService

folder, options = sys.argv[1], json.loads(sys.argv[2])

def run(rank):
    torch.manual_seed(rank)
    service = WorkersReadingService(**options["service"])
    if options.get("sequential"):
        service = SequentialReadingService(DistributedReadingService(), service)
    pipe = SeedTeller(uneven_pipe())
    if options.get("joined"):
        pipe = pipe.join_workers()
    loader, found = DataLoader2(pipe, reading_service=service), []
    for epoch in range(3):
        if options.get("dl_seed"):
            loader.seed(epoch + rank)
        found.append(list(loader))
    loader.shutdown()
    return found

if __name__ == "__main__":
    run_ranks(run, folder)
"""


def run_ranks(folder: Path, **options: Any) -> list[list[list[Any]]]:
    """Returns, for each of three epochs, what each of two ranks got."""
    folder.mkdir()
    found = ranks_of(RANKS, folder, json.dumps(options))
    return [list(epoch) for epoch in zip(*found, strict=True)]


def items(found: list[Any]) -> list[tuple[int, int]]:
    return [tuple(item) for item, _, _ in found]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"service": {"num_workers": 2, "distributed": True}}, marks=pytest.mark.slow),
        pytest.param(
            {"service": {"num_workers": 2, "distributed": True, "seed": 5}, "joined": True}, marks=pytest.mark.slow
        ),
        pytest.param({"service": {"num_workers": 0, "distributed": True}}, marks=pytest.mark.slow),
        pytest.param({"service": {"num_workers": 2, "distributed": True}, "dl_seed": True}, marks=pytest.mark.slow),
        pytest.param(
            {"service": {"num_workers": 2, "distributed": True, "multiprocessing_context": "spawn"}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["unseeded", "seed= and joined", "no workers", "dl.seed differs between ranks", "spawn"],
)
def test_ranks_share_each_epoch_when_distributed(tmp_path: Path, options: Any) -> None:
    """Over both ranks each item comes once, none is cut off, each epoch has a new order, each worker its own seed."""
    epochs = run_ranks(tmp_path / "run", **options)
    for ranks in epochs:
        assert sorted(item for found in ranks for item in items(found)) == items_of(SIZES)
        seeds = {(rank, worker): seed for rank, found in enumerate(ranks) for _, seed, worker in found}
        assert len(set(seeds.values())) == len(seeds)
    assert len({str([items(found) for found in ranks]) for ranks in epochs}) == 3


@pytest.mark.slow
def test_ranks_share_each_epoch_when_behind_a_distributed_service(tmp_path: Path) -> None:
    """In a SequentialReadingService ranks end together: nothing twice, and fullsync's cut is all that is missing."""
    for ranks in run_ranks(tmp_path / "run", service={"num_workers": 2}, sequential=True):
        found = [item for rank in ranks for item in items(rank)]
        assert len(ranks[0]) == len(ranks[1])
        assert len(found) == len(set(found))
        assert set(found) <= set(items_of(SIZES))


@pytest.mark.slow
def test_ranks_refuse_to_be_divided_twice_when_both_services_would(tmp_path: Path) -> None:
    """distributed=True behind a DistributedReadingService is an error that says which to drop."""
    options = {"service": {"num_workers": 2, "distributed": True}, "sequential": True}
    assert "drop distributed=True" in run_script(RANKS, str(tmp_path), json.dumps(options), seconds=90).stderr


def test_ranks_are_asked_for_when_there_is_no_process_group() -> None:
    """distributed=True without torch.distributed is an error that says what to call."""
    loader = DataLoader2(uneven_pipe(), reading_service=WorkersReadingService(2, distributed=True))
    with pytest.raises(RuntimeError, match="init_process_group"):
        iter(loader)
    loader.shutdown()


def test_ranks_are_warned_when_all_of_them_read_everything(monkeypatch: Any, caplog: Any) -> None:
    """Several ranks and no division among them is logged, with the cure."""
    monkeypatch.setattr(ranks_module, "distributed_place", lambda: Place(4, 1))
    monkeypatch.setattr(handlers, "said", set())
    with DataLoader2(uneven_pipe(), reading_service=WorkersReadingService(0)) as loader:
        assert sorted(loader) == items_of(SIZES)
    assert "each of the 4 ranks" in caplog.text
    assert "distributed=True" in caplog.text
