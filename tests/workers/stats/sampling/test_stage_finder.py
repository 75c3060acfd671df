"""Which stage a thread is in, by its stack."""

import sys
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from torchdata_wds.workers.stats.sampling.stage_finder import StageFinder, stages_in_order


class Looker:
    """Notes which stage of a graph calls it, as a function for items or as a handler."""

    def __init__(self) -> None:
        self.seen: list[IterDataPipe[Any] | None] = []
        self.watch([])

    def watch(self, stages: list[IterDataPipe[Any]]) -> None:
        self.seen.clear()
        self._stages, self._finder = stages, StageFinder(stages)

    def look(self, item: Any) -> Any:
        spot = self._finder.spot(sys._getframe(1))
        self.seen.append(None if spot is None else self._stages[spot.stage])
        return item

    def accept(self, error: Exception) -> bool:
        self.look(error)
        return True


def test_thread_is_in_the_stage_that_calls_a_function() -> None:
    looker = Looker()
    first = IterableWrapper(range(3)).map(looker.look)
    pipe = first.map(looker.look)
    looker.watch(stages_in_order(pipe))
    assert list(pipe) == [0, 1, 2]
    assert looker.seen == [first, pipe] * 3
    looker.look(0)
    assert looker.seen[-1] is None


def test_thread_is_in_the_first_of_two_stages_that_run_as_one_loop(tmp_path: Path) -> None:
    """Also where the graph has several such pairs: in the one before the stage that runs."""
    looker = Looker()
    urls = [*write_text_shards(tmp_path, [2, 2]), str(tmp_path / "missing.tar")]
    loaders = [IterableWrapper(urls).load_wds_shards(handler=looker.accept) for _ in range(2)]
    for number in (1, 2):  # pairs
        pipe = loaders[0].group_by_key()
        pipe = pipe if number == 1 else pipe.concat(loaders[1].group_by_key())
        looker.watch(stages_in_order(pipe))
        assert len(list(pipe)) == 4 * number
        assert looker.seen == loaders[:number]
