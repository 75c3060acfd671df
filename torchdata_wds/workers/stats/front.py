"""What all loaders tell about themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch.distributed

from torchdata_wds.workers.engine import Engine
from torchdata_wds.workers.stats.loader_stats import LoaderStats, RankStats


class Observed:
    """Base of what runs a graph with an engine: `WdsLoader` and the reading services."""

    _engine: Engine

    @overload
    def stats(self) -> LoaderStats: ...
    @overload
    def stats(self, *, all_ranks: Literal[True]) -> RankStats: ...
    def stats(self, *, all_ranks: bool = False) -> LoaderStats | RankStats:
        """Returns figures of the running or last epoch: where its time went, in waits, workers, stages and sources.

        They are always collected; ``report()`` of the result writes them as tables, with a sentence about what holds
        the training back. The counts of workers are up to half a second old.

        Args:
            all_ranks: Whether to return those of all ranks of ``torch.distributed``, in a list; all must call this.

        Raises:
            RuntimeError: with `all_ranks`, if ``torch.distributed`` is not initialized.

        Example:
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> from torchdata_wds import WdsLoader
            >>> loader = WdsLoader(IterableWrapper(range(9)).batch(3))
            >>> _ = list(loader)
            >>> loader.stats().total.items
            3
        """
        found = self._engine.stats.stats()
        if not all_ranks:
            return found
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise RuntimeError("stats(all_ranks=True) needs torch.distributed: initialize it, or leave all_ranks out")
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, found)
        return RankStats(gathered)

    def send_stats(self, function: Callable[[LoaderStats], object], *, every: float = 30.0) -> None:
        """Calls a function with the figures while an epoch runs, from a thread, and once at the end of each epoch.

        `recent` holds the figures since the last call of that function. An exception of the function is logged once.

        Args:
            function: ``callable(stats)``, which takes a `LoaderStats`.
            every: The seconds between two calls; 0 calls it only at the end of each epoch.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if `every` is negative.

        Example:
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> from torchdata_wds import WdsLoader
            >>> loader = WdsLoader(IterableWrapper(range(9)))
            >>> loader.send_stats(lambda stats: print(stats.total.items), every=60)
            >>> _ = list(loader)
            9
        """
        self._engine.stats.send(function, every)

    def skipped(self, *, by_rule: bool = False) -> dict[str, dict[str, int]]:
        """Counts what the stages skipped in the running or last epoch, in all workers of this rank.

        The counts are by stage, written as in the chain, and by exception type or reason. A warning at the end of the
        epoch reports the same.

        Args:
            by_rule: Whether to include what a rule left out on purpose: hidden files and folders in shards, samples for
                which a function returned None.

        Example:
            >>> from torch.utils.data.datapipes.iter import IterableWrapper
            >>> from torchdata_wds import WdsLoader, ignore_and_continue
            >>> loader = WdsLoader(IterableWrapper(["1", "x"]).wds_map(int, handler=ignore_and_continue))
            >>> list(loader)
            [1]
            >>> loader.skipped()
            {'wds_map(int)': {'ValueError': 1}}
        """
        return self._engine.skips.counts(by_rule=by_rule)
