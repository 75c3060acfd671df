"""The global order that a graph follows, and where a job is in it: the state that all ranks share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher

from torchdata_wds.pipes.chain_text import form_name, sources_of, stages_of
from torchdata_wds.pipes.order.agreement import check_agreement
from torchdata_wds.pipes.order.blocks import Share, count_samples, step_end
from torchdata_wds.pipes.order.ordered_pipe import Contents, OrderedPipe, OrderPoint, check_share
from torchdata_wds.pipes.resume_facts import said_by
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.process_place import Place
from torchdata_wds.workers.resume.checkpoints import Checkpoint, OrderState, Streams
from torchdata_wds.workers.resume.planner import is_one_to_one, is_torchdata

#: The state of a loader that has not begun. It has the keys of all others, which a distributed checkpoint needs.
UNSTARTED_ORDER = OrderState("", None, 0)

_CURES = {
    "filter": "write .wds_map(f), where f returns None for a sample to leave out: its batch gets shorter, and all "
    "others stay as they are",
    "shuffle": "drop it: load_in_order shuffles, and run=1 shuffles perfectly",
    "wds_shuffle": "drop it: load_in_order shuffles, and run=1 shuffles perfectly",
    "sharding_filter": "drop it: load_in_order divides the samples itself",
    "wds_epoch": "drop it: an epoch is one pass over the samples; the iterator's limit(n) pauses after n items",
    "wds_mix": "mix the sets with IndexedMix",
    "mux": "mix the sets with IndexedMix",
    "unbatch": "drop it, and the .batch(n) before it",
    "wds_unbatch": "drop it, and the .batch(n) before it",
    "prefetch": "drop it: workers make items ahead, and read_ahead= reads ahead",
    "cache_samples": "drop it: cache= of load_in_order keeps copies of shards",
}
_JOINED_CURE = "put what it adds into the samples with .map(f)"
_OTHER_CURE = "write a stage that yields one item for each, such as .map(f) or .wds_map(f)"


class OrderedStreams(Streams):
    """The streams of a rank's workers, which all begin at one position."""

    def __init__(self, workers: int, point: OrderPoint, ranks: int = 1) -> None:
        super().__init__(workers)
        self.point = point
        self._ranks = ranks

    def points(self) -> list[Any]:
        """Returns where each worker begins."""
        return [self.point] * len(self.facts)

    def point_of(self, worker: int) -> OrderPoint:
        """Returns where a worker goes on after the items that were taken from it."""
        # Of 2 workers and 3 ranks with items of 8 samples, each item of a worker is 48 positions after the one before.
        counts, point = self.turns.at(self.taken)[0], self.point
        done = counts[worker] * len(counts) * self._ranks * point.item
        return point._replace(base=max(point.base, min(point.base + done, point.contents.total)))

    def taken_for(self, items: int) -> int:
        """Returns how many items, including those left out, the workers had passed when `items` had come."""
        taken = super().taken_for(items)
        counts, order = self.turns.at(taken)
        # A handler ended worker 1 of 3 before its item 7: after items 0 to 6, 8 and 9, the next one is item 11.
        return counts[order[0]] * len(counts) + order[0] if order else taken


class JobOrder:
    """The order that a loader's graph follows, and where the job is in it."""

    def __init__(self, pipe: OrderedPipe, batchers: list[Batcher]) -> None:
        self.pipe = pipe
        self.block = math.prod(batcher.batch_size for batcher in batchers)  # how many samples make an item
        self._batchers = batchers  # from the first to the last
        self.seed: int | None = None  # that of the running epoch
        self._contents: Contents | None = None
        self._ranks = 1

    @property
    def is_seeded(self) -> bool:
        """Whether the order has a seed of its own."""
        return self.pipe.seed is not None

    def begin(self, number: int, restored: Checkpoint | None, seed: int | None, draw: Callable[[], int]) -> Seeds:
        """Begins epoch `number`; returns its seeds. `seed` is the loader's; without one, `draw` returns a seed."""
        state = None if restored is None else restored.order
        self._contents = contents = self.pipe.contents_now()
        given = seed if self.pipe.seed is None else self.pipe.seed
        if state is not None:
            _check_state(state, contents, given)
            self.seed = state.seed
        if given is not None:
            self.seed = given
        elif self.seed is None:
            self.seed = draw()
        check_agreement(self.pipe, contents.digest, self.seed, number)
        is_inside = restored is not None and restored.in_epoch and restored.epoch == number + 1
        base = state.position if state is not None and is_inside else 0
        self._ranks = self.pipe.grid().ranks
        self.point = OrderPoint(contents, self.seed, number, base, self.block, self.block)
        return self.point.stream_seeds

    def count_items(self, ranks: Place, base: int = 0) -> int:
        """Returns how many items a rank gets in an epoch, over all of its workers, from a position on."""
        check_share(form_name(self.pipe), self.total, ranks.consumers, self.block, self.pipe.even)
        steps, rest = divmod(max(self.total - base, 0), ranks.consumers * self.block)
        # 10 samples, 2 ranks, batches of 3: after one step, rank 0 has a batch of 3 more, and rank 1 one of 1.
        last = count_samples(self.total, self.total - rest, Share(*ranks), self.block, self.pipe.even)
        return steps + self.batched(last)

    def batched(self, samples: int) -> int:
        """Returns how many items the stages after the order make of samples that one consumer reads."""
        count = samples
        for batcher in self._batchers:
            count = count // batcher.batch_size if batcher.drop_last else -(-count // batcher.batch_size)
        return count

    @property
    def total(self) -> int:
        """How many positions an epoch has: the running one, else the next."""
        self._contents = self._contents or self.pipe.contents_soon()
        return self._contents.total

    def streams(self, workers: int) -> OrderedStreams:
        """Returns the streams of the running epoch."""
        return OrderedStreams(workers, self.point, self._ranks)

    def checkpoint(self, number: int, position: int) -> Checkpoint:
        """Returns the state at a position of epoch `number`."""
        assert self._contents is not None
        order = OrderState(self._contents.digest, self.seed, position)
        return Checkpoint({}, number + bool(position), bool(position), None, None, None, order)

    def checkpoint_after(self, items: int) -> Checkpoint:
        """Returns the state after `items` items on each rank since the running epoch began or was resumed."""
        position = step_end(self.total, self.point.base, self._ranks, self.block, items)
        return self.checkpoint(self.point.epoch, position)


def check_kind(restored: Checkpoint | None, order: JobOrder | None) -> None:
    """Raises a ValueError if only one of the state and the graph has a global order."""
    if restored is None or (restored.order is None and not restored.signature):
        return
    if (restored.order is None) != (order is None):
        has, lacks = ("a graph without", "has") if order is not None else ("a graph with", "does not have")
        raise ValueError(
            f"the state belongs to a different run and cannot be resumed here: it is that of {has} load_in_order, "
            f"which this graph {lacks}"
        )


def _check_state(state: OrderState, contents: Contents, seed: int | None) -> None:
    differences = []
    if state.digest and state.digest != contents.digest:
        differences.append(
            f"shards, index, or run= and shuffle= of the order: {state.digest} then, {contents.digest} now"
        )
    if None not in (state.seed, seed) and state.seed != seed:
        differences.append(f"seed: {state.seed} then, {seed} now")
    if not state.digest and state.position > contents.total:
        raise ValueError(f"cannot seek position {state.position:,}: an epoch has {contents.total:,} samples")
    if state.position > contents.total:
        differences.append(f"position: {state.position:,}, and an epoch has {contents.total:,} samples now")
    if differences:
        raise ValueError(
            "the state belongs to a different run and cannot be resumed here. Differences: " + "; ".join(differences)
        )


def find_order(end: IterDataPipe[Any]) -> JobOrder | None:
    """Returns the order that a graph follows, None if it follows none.

    Raises a ValueError that names a stage after the order which may yield more, fewer or other items than it takes.
    """
    if not any(said_by(stage, "is_ordered") for stage in stages_of(end)):
        return None
    batchers: list[Batcher] = []
    pipe = end
    while not said_by(pipe, "is_ordered"):
        sources = sources_of(pipe)
        if len(sources) != 1:
            raise _refused(pipe, "joins several streams", _JOINED_CURE)
        if type(pipe) is Batcher:
            if not all(stage.is_replicable() for stage in stages_of(pipe) if hasattr(stage, "is_replicable")):
                raise _refused(pipe, "runs in the main process", cure="put .batch(n) before .join_workers()")
            batchers.insert(0, pipe)
        elif not is_one_to_one(pipe) and not is_torchdata(pipe, "PinMemory"):
            raise _refused(pipe, "may yield more, fewer or other items than it takes")
        (pipe,) = sources
    assert isinstance(pipe, OrderedPipe)
    return JobOrder(pipe, batchers)


def _refused(pipe: Any, why: str, otherwise: str = _OTHER_CURE, *, cure: str = "") -> ValueError:
    name = form_name(pipe)
    return ValueError(
        f"{name} {why}, so it cannot follow load_in_order: a state could not say by a position where its items are. "
        f"Instead, {cure or _CURES.get(name, otherwise)}"
    )
