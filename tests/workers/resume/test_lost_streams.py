"""Workers that are lost and replaced: their streams go on at the first item that was not taken."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.order_kit import LocalPool, drawn, local_workers
from tests.kits.shards import write_text_shards
from torchdata_wds import WdsLoader, ignore_and_continue
from torchdata_wds.workers.resume.lost_streams import point_of
from torchdata_wds.workers.stream_pool import END

SIZES = [5, 0, 7, 3, 11, 6]


class LossyPool(LocalPool):
    """Loses a worker now and then, before an item is taken from it or from another one."""

    chance = random.Random(5)

    def _take(self, number: int, turn: int) -> Any:
        if self.chance.random() < 0.2:
            self.wait_for_facts()
            lost = self.chance.randrange(self._num_workers)
            assert self._stream_seeds is not None
            point = point_of(self._graph.datapipe, self.streams, lost, self._stream_seeds)
            self._made[lost].close()
            self._graphs[lost] = self.new_worker()
            self._made[lost] = self.stream(lost, point, self.streams)
            if point is not None and lost not in self.streams.turns.at(self.streams.taken)[1]:
                assert next(self._made[lost], END) is END  # as an actor does that gets an order for the end of an epoch
        return super()._take(number, turn)


def samples(urls: list[str]) -> IterDataPipe[Any]:
    return IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key().wds_decode()


def damaged(urls: list[str]) -> IterDataPipe[Any]:
    for url in urls[1::2]:
        path = Path(url)
        path.write_bytes(path.read_bytes()[:1700] + b"no header" * 100)
    pipe = IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards(handler=ignore_and_continue)
    return pipe.group_by_key()


def endless(urls: list[str]) -> IterDataPipe[Any]:
    pipe = IterableWrapper(urls).resample_shards().load_wds_shards().group_by_key().wds_shuffle(4)
    return pipe.map(drawn).wds_epoch(20)


def in_order(urls: list[str]) -> IterDataPipe[Any]:
    return IterableWrapper(urls).load_in_order(run=2).wds_map(some, handler=ignore_and_continue).batch(3)


def some(sample: dict[str, Any]) -> tuple[Any, ...] | None:
    return None if sample["__key__"].startswith(("s0", "s3")) else drawn(sample)


GRAPHS: dict[str, Callable[[list[str]], IterDataPipe[Any]]] = {
    "batches": lambda urls: samples(urls).batch(2),
    "damaged": damaged,
    "shuffle": lambda urls: samples(urls).wds_shuffle(5),
    "mixture": lambda urls: samples(urls[:3]).wds_mix(samples(urls[3:]), weights=[1, 2], stop="all"),
    "replayed": lambda urls: IterableWrapper(range(40)).shuffle().sharding_filter(),
    "order": in_order,
    "epochs": endless,
}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_epochs_are_those_of_an_undisturbed_run(name: str, workers: int, tmp_path: Path) -> None:
    """Over three epochs, with what is skipped; also where whole items are, and from a state on."""
    urls = write_text_shards(tmp_path, SIZES)

    def epochs(pool: type[LocalPool]) -> list[Any]:
        with local_workers(pool), WdsLoader(GRAPHS[name](urls), workers, seed=3) as loader:
            begun = [str(item) for _, item in zip(range(5), loader, strict=False)]
            state = loader.state_dict()
            loader.load_state_dict(state)
            return [begun, *(([str(item) for item in loader], loader.skipped(by_rule=True)) for _ in range(3))]

    assert epochs(LossyPool) == epochs(LocalPool)
