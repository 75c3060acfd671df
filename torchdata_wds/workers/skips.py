"""What the stages of a graph skip in one process, counted where it happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data.graph import DataPipe, traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from torchdata_wds.handlers import SkipCounts
from torchdata_wds.pipes.chain_text import stage_text
from torchdata_wds.pipes.resume_facts import ItemsSkipped
from torchdata_wds.pipes.seeds import above_filters

logger = logging.getLogger(__name__)
_LONGEST_EXAMPLE = 500


class SkipWatch:
    """Sees what the stages of a graph skip in this process."""

    def __init__(self, datapipe: DataPipe) -> None:
        pipes = get_all_graph_pipes(traverse_dps(datapipe))
        agreed = above_filters(pipes)
        self._watched: list[tuple[Any, SkipCounts, bool]] = [
            (pipe, counts, id(pipe) in agreed)
            for pipe in pipes
            if isinstance(counts := vars(pipe).get("skipped"), SkipCounts)
        ]
        self._seen: list[dict[str, int]] = [dict(counts) for _, counts, _ in self._watched]

    def news(self, *, is_first: bool = True) -> Iterator[ItemsSkipped]:
        """Yields what was skipped since the last call.

        Stages before a sharding filter skip the same in all consumers: only the first (`is_first`) reports them.
        """
        for number, (pipe, counts, is_agreed) in enumerate(self._watched):
            seen = self._seen[number]
            if dict.__eq__(counts, seen):  # that of Counter is slow
                continue
            now = self._seen[number] = dict(counts)
            if is_agreed and not is_first:
                continue
            stage = stage_text(pipe, without=("handler",))
            for reason, times in now.items():
                if times != seen.get(reason, 0):
                    example = counts.examples.pop(reason, "")[:_LONGEST_EXAMPLE]
                    yield ItemsSkipped(stage, reason, times - seen.get(reason, 0), reason in counts.losses, example)
