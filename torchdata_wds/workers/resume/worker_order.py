"""The global order under a loader that does not know of it and keeps a state for each worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.consumers import Grid
from torchdata_wds.pipes.order.blocks import Share, count_samples
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.process_place import Place
from torchdata_wds.workers.resume.checkpoints import Checkpoint
from torchdata_wds.workers.resume.job_order import JobOrder, OrderedStreams, check_kind

_STEP = "step"


class WorkerOrder:
    """The order that a `StatefulPipeline` follows in one worker.

    A worker's state has the position at which the step of its next block begins, and is the same on all ranks. Of 2
    workers and steps of 8 samples, worker 1 has delivered its first block: its next one is in the step from position
    24. So the loader as a whole is at the least position of its workers' states. A worker that resumes takes the steps
    from 24, 40, 56, ..., which is right only while ranks, block and number of workers stay the same: with several
    workers, the state says how long a step is.
    """

    def __init__(self, order: JobOrder, place: Grid) -> None:
        self._order = order
        self._place = place
        self._workers = max(place.workers, 1)
        self._block = block_of(order)
        self._step = place.ranks * self._block

    def begin(self, number: int, state: Mapping[str, Any] | None, seed: int) -> tuple[Seeds, OrderedStreams]:
        """Begins epoch `number`, where a state says; returns its seeds, and its stream."""
        restored = None if state is None else Checkpoint.from_plain(state)
        check_kind(restored, self._order)
        worker = None
        if state is not None and _STEP in state:
            self._check_step(state[_STEP])
            worker = 0
        seeds = self._order.begin(number, restored, seed, int)
        self._point = self._order.point._replace(block=self._block, worker=worker)
        return seeds, OrderedStreams(1, self._point)

    def _check_step(self, step: object) -> None:
        if self._workers == 1 or step != self._step:
            raise ValueError(
                f"the state is that of one of several workers, in steps of {step} samples, and cannot be resumed here "
                f"with {self._workers} workers and steps of {self._step} samples (ranks times block). To go on with "
                "other numbers, do not load it: call seek(position, epoch=epoch) of a new StatefulPipeline, with "
                "epoch, position = StatefulPipeline.position_in(state)"
            )

    def state(self, items: int, *, is_over: bool) -> dict[str, Any]:
        """Returns the state after `items` items since the epoch began or was resumed.

        Raises:
            RuntimeError: in the middle of a block.
        """
        point, total = self._point, self._order.total
        full, rest = divmod(items * point.item, point.block)
        number = (self._place.worker if point.worker is None else point.worker) + full * self._workers
        position = point.base + number * self._step
        if rest and not is_over:
            if self._place.ranks * self._workers > 1:
                raise RuntimeError(
                    f"a state cannot be taken in the middle of a block of {point.block} samples, after {rest} of them: "
                    "take it after whole batches, with block= of load_in_order equal to the batch size"
                )
            position += rest
        position = total if is_over else min(position, total)
        state = self._order.checkpoint(point.epoch, position).to_plain()
        return {**state, _STEP: self._step} if self._workers > 1 else state


def block_of(order: JobOrder) -> int:
    """Returns how many samples a worker takes in turn; raises a ValueError if the block cuts items apart."""
    block = order.block if order.pipe.block == 1 else order.pipe.block
    if block % order.block:
        raise ValueError(f"block={block} of load_in_order must be a multiple of the {order.block} samples of an item")
    return block


def count_items(order: JobOrder, ranks: Place, workers: int, batch_size: int | None, *, drop_last: bool) -> int:
    """Returns how many items a rank's workers yield; its quotient by the loader's batch size is the loader's length."""
    pipe, workers = order.pipe, max(workers, 1)
    shares = (Share(*ranks, workers, worker) for worker in range(workers))
    counts = [order.batched(count_samples(order.total, 0, share, block_of(order), pipe.even)) for share in shares]
    if batch_size is None:
        return sum(counts)
    return batch_size * sum(count // batch_size if drop_last else -(-count // batch_size) for count in counts)


def states_in(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the states of this package that are somewhere in the state of a loader."""
    if isinstance(state, Mapping):
        if {"index", "seed", "epoch", "position"} <= state.keys():
            yield state
            return
        for value in state.values():
            yield from states_in(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from states_in(value)
