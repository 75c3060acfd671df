"""IndexedMix: sets of shards mixed by weights, in one order for every grid."""

import json
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.graph import traverse_dps

from tests.kits.processes import open_files
from tests.kits.shards import write_text_shards
from torchdata_wds import IndexedMix, IndexedShards, ShardListError, WdsLoader, warn_and_continue

LARGE, SMALL = (20, 0, 13), (4, 3)
LENGTH = 50


@pytest.fixture(autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps indexes that are made here away from the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "indexes"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The shards of a large and a small set."""
    made = []
    for name, sizes in (("large", LARGE), ("small", SMALL)):
        folder = tmp_path_factory.mktemp(name)
        made.append(write_text_shards(folder, sizes))
    return made


def mix_of(shards: list[list[str]], **options: Any) -> IndexedMix:
    """Two thirds from the large set, one third from the small one."""
    large, small = map(IndexedShards, shards)
    return IndexedMix({large: 2, small: 1}, **{"length": LENGTH, "run": 4, **options})


def origins(batch: list[dict[str, Any]]) -> list[str]:
    """Where the samples of a batch are from."""
    return [f"{Path(sample['__url__']).parent.name}/{sample['__key__']}" for sample in batch]


def job(shards: list[list[str]], ranks: int, workers: int, batch: int, state: Any = None) -> Iterator[str]:
    """The samples of all ranks of a job, in order."""
    loaders = [
        WdsLoader(mix_of(shards).batch(batch).map(origins), workers, seed=3, ranks=(rank, ranks))
        for rank in range(ranks)
    ]
    for loader in loaders if state is not None else ():
        loader.load_state_dict(state)
    running = [iter(loader) for loader in loaders]
    while running:
        for items in list(running):
            found = next(items, None)
            if found is None:
                running.remove(items)
            else:
                yield from found
    for loader in loaders:
        loader.shutdown()


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 0, 1), (3, 0, 4), (2, 2, 5)])
def test_mix_is_the_same_on_every_grid(shards: list[list[str]], ranks: int, workers: int, batch: int) -> None:
    """Ranks, workers and batch size do not change which sample comes at a position."""
    assert list(job(shards, ranks, workers, batch)) == list(job(shards, 1, 0, 7))


def test_mix_resumes_on_another_grid(shards: list[list[str]]) -> None:
    """In the second epoch, which continues the passes of the first."""
    loader = WdsLoader(mix_of(shards).batch(4).map(origins), 0, seed=3)
    assert len([sample for batch in loader for sample in batch]) == LENGTH
    items = iter(loader)
    begun = [sample for _ in range(5) for sample in next(items)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["epoch"] == 1
    assert state["position"] == 20
    rest = [sample for batch in items for sample in batch]
    assert list(job(shards, 3, 0, 5, state)) == rest
    assert len(begun) + len(rest) == LENGTH


def test_mix_gives_each_sample_of_a_set_before_it_repeats_one(shards: list[list[str]]) -> None:
    """Over epochs, of which the small set passes several, and the large one only half."""
    loader = WdsLoader(mix_of(shards).batch(1).map(origins), 0, seed=3)
    found = [sample for _ in range(3) for batch in loader for sample in batch]
    for name, total in (("large", sum(LARGE)), ("small", sum(SMALL))):
        own = [sample for sample in found if sample.startswith(name)]
        for begin in range(0, len(own) - total, total):
            assert len(set(own[begin : begin + total])) == total
    counts = Counter(sample.partition("/")[0].rstrip("0123456789") for sample in found)
    assert counts["large"] == pytest.approx(2 * counts["small"], abs=9)


def test_mix_takes_parts_and_decodes_as_its_sets_do(shards: list[list[str]]) -> None:
    """A slice of a set is a set; a field is decoded where the set was told to."""
    part, rest = IndexedShards(shards[0], decode=())[5:9], IndexedShards(shards[1])
    keys = {sample["__key__"] for sample in IndexedShards(shards[0])[5:9]}
    samples = list(IndexedMix({part: 1, rest: 1}, length=40, seed=1))
    decoded = [sample for sample in samples if isinstance(sample["cls"], int)]
    assert {sample["__key__"] for sample in decoded} == keys
    assert len(decoded) == pytest.approx(20, abs=4)


def test_mix_skips_what_cannot_be_decoded_when_the_handler_says_so(shards: list[list[str]]) -> None:
    """The batch is shorter; the order stays."""

    def decoder(field: str, data: bytes) -> Any:
        if field == ".cls" and data == b"3":
            raise ValueError("no")
        return data

    large, small = IndexedShards(shards[0], decode=decoder), IndexedShards(shards[1])
    mix = IndexedMix({large: 2, small: 1}, length=LENGTH, run=4, handler=warn_and_continue)
    found = [origins(batch) for batch in WdsLoader(mix.batch(5), 0, seed=3)]
    whole = list(job(shards, 1, 0, 5))
    lost = [sample for sample in whole if sample.startswith("large") and sample.endswith("3")]
    assert lost
    assert [[s for s in whole[b : b + 5] if s not in lost] for b in range(0, LENGTH, 5)] == found


def test_mix_comes_once_under_torch_workers(shards: list[list[str]]) -> None:
    """A torch DataLoader does not know the order; its workers agree on one all the same."""
    mix = mix_of(shards, seed=3, block=5).batch(5).map(origins)
    found = [sample for batch in DataLoader(mix, None, num_workers=2) for sample in batch]
    assert len(found) == LENGTH
    assert sum(sample.startswith("large") for sample in found) == pytest.approx(LENGTH * 2 / 3, abs=9)


def test_mix_pickles_closes_its_files_and_has_a_length(shards: list[list[str]]) -> None:
    """As every pipe."""
    mix = mix_of(shards, seed=3)
    first = origins(list(pickle.loads(pickle.dumps(mix))))
    assert origins(list(mix)) == first
    before = open_files()  # among them the indexes
    assert len(mix) == LENGTH
    assert traverse_dps(mix)
    for _ in mix:
        break
    assert open_files(collect=False) <= before
    assert len(WdsLoader(mix_of(shards, length=None).batch(7), 0)) == 6  # 40 samples in all


@pytest.mark.parametrize(("sets", "error"), [([], TypeError), ({}, ValueError), ({"x.tar": 1}, TypeError)])
def test_mix_refuses_what_is_no_mixture(sets: Any, error: type[Exception]) -> None:
    """In the constructor."""
    with pytest.raises(error):
        IndexedMix(sets)


@pytest.mark.parametrize("weight", [0, float("nan")])
def test_mix_refuses_weights_that_are_none(shards: list[list[str]], weight: float) -> None:
    """In the constructor."""
    with pytest.raises(ValueError, match="weight"):
        IndexedMix({IndexedShards(shards[0]): weight})


def test_mix_refuses_a_set_without_samples(shards: list[list[str]], tmp_path: Path) -> None:
    """Its weight could not be kept."""
    empty = IndexedShards(write_text_shards(tmp_path, (0,)))
    with pytest.raises(ShardListError, match="source 1 of the mixture"):
        list(IndexedMix({IndexedShards(shards[0]): 1, empty: 1}))
