"""The border between the stages of the worker processes and those of the main process."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info

from torchdata_wds.consumers import in_stock_worker, note_join
from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.base import Pipe, WdsPipe, register
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.pipes.running import running_pipes

T = TypeVar("T")


class _WorkerEnd(NamedTuple):
    """The mark that a worker of torchdata's service sends instead of items once its stream has ended."""

    worker: int


class _MarkedEndIterDataPipe(WdsPipe[Any]):
    """The worker's side of the border: in a worker of torchdata's service, endless end marks follow the stream.

    torchdata's service requests items from its workers in turn, and breaks when one ends well before another. torch's
    own workers, and graphs in one process, need no marks.
    """

    one_to_one = True
    is_inner = True

    def __init__(self, source_datapipe: Pipe) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        note_join()
        yield from self.source_datapipe
        while in_stock_worker():
            yield _WorkerEnd(os.getpid())

    def __len__(self) -> int:
        return len(self.source_datapipe)  # a TypeError if the source does not know its length


@register("join_workers")
class JoinWorkersIterDataPipe(WdsPipe[T]):
    """Joins the streams of all workers into one in the main process (functional name: ``join_workers``).

    Stages before it run in the workers, stages after it in the main process. That holds under ``WorkersReadingService``
    (where each branch with a ``join_workers`` has its own workers) and torchdata's ``MultiProcessingReadingService``,
    which without it loses items or breaks when the streams of its workers differ in length. (Pass that service
    ``main_prefetch_cnt=0``, or its shutdown after an early break may hang.) torch's ``DataLoader`` and
    ``StatefulDataLoader`` run all stages in each worker, with a warning. Items come from worker 0, 1, ... in turn; a
    worker whose stream has ended is skipped.

    Args:
        source_datapipe: The stages that workers run.

    Yields:
        The items of the source.

    Raises:
        RuntimeError: if end marks come from the workers of an unknown service.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> list(IterableWrapper(range(5)).sharding_filter().batch(2).join_workers().unbatch())
        [0, 1, 2, 3, 4]
    """

    one_to_one = True

    def __init__(self, source_datapipe: IterDataPipe[T]) -> None:
        self.source_datapipe: Pipe = _MarkedEndIterDataPipe(source_datapipe)

    def is_replicable(self) -> bool:
        """Returns False, so that reading services keep this pipe and all later ones in the main process."""
        return False

    def __iter__(self) -> Iterator[T]:
        worker = get_worker_info()
        # In the first worker of a torch DataLoader, which also runs the stages meant for the main process:
        if worker is not None and worker.num_workers > 1 and not worker.id:
            others = (pipe for pipe in running_pipes() if pipe is not self)
            if stages := [short_name(pipe) for pipe in others if not getattr(pipe, "runs_others", False)]:
                warn_once(
                    "border",
                    f".join_workers() joins nothing here: torch's DataLoader runs the whole graph in each of its "
                    f"{worker.num_workers} workers, also what follows ({', '.join(stages)}), so that "
                    "batches and shuffles are those of one worker, and each worker has a short last batch of its own. "
                    "Use DataLoader2(pipe, reading_service=WorkersReadingService(num_workers))",
                )
        ended: set[int] = set()
        for item in self.source_datapipe:
            if type(item) is not _WorkerEnd:
                yield item
                continue
            ended.add(item.worker)
            if len(ended) == _stock_worker_count(self.source_datapipe):
                return

    def __len__(self) -> int:
        return len(self.source_datapipe)


def _stock_worker_count(source: Any) -> int:
    """Returns how many workers of torchdata's service feed a pipe of the main process."""
    while source is not None:
        if type(source).__name__ == "_IterateQueueDataPipes":
            return len(source.datapipes)
        source = getattr(source, "source_datapipe", None)
    raise RuntimeError(
        "join_workers met the end of a worker's stream, but finds no worker of MultiProcessingReadingService upstream: "
        "only its prefetcher may stand between the two"
    )
