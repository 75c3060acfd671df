"""The state of a loader in the middle of an epoch, and the way back to it."""

from __future__ import annotations

import logging
import pickle
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import Batcher
from torch.utils.data.graph import DataPipe, traverse_dps

from torchdata_wds.handlers import warn_once
from torchdata_wds.pipes.chain_text import short_name
from torchdata_wds.workers.resume.planner import find_chain, has_functions, is_one_to_one, is_torchdata
from torchdata_wds.workers.resume.signatures import Signature
from torchdata_wds.workers.resume.states import Streams, Turns, pack_facts, unpack_facts
from torchdata_wds.workers.resume.stream import Seeds

logger = logging.getLogger(__name__)

_EPOCH_BEHIND = (
    "a state cannot be taken where .wds_epoch() stands behind .join_workers(): put it before, where it counts the "
    "items of all workers as well"
)


class Run(Protocol):
    """What runs a part of a graph: a pool of workers, or the main process."""

    streams: Streams
    was_interrupted: bool

    def begin(self, seeds: Seeds, streams: Streams) -> None:
        """Starts an epoch."""

    def wait_for_facts(self) -> None:
        """Waits until it is known where the epoch began."""

    def close(self) -> None:
        """Ends what runs."""


class Checkpoint(NamedTuple):
    """The state of a reading service.

    Attributes:
        signature: What it belongs to.
        epoch: How many epochs had begun.
        in_epoch: Whether it is in the middle of one, the last that began.
        generator: The seed generator as that epoch found it.
        stream_seeds: The seeds of the epoch that the streams began with; None if none has begun.
        streams: Where the streams are; None where they begin anew with the next epoch.
    """

    signature: Signature
    epoch: int
    in_epoch: bool
    generator: bytes
    stream_seeds: Seeds | None
    streams: Any

    def dump(self) -> bytes:
        """Returns the state as bytes."""
        return zlib.compress(pickle.dumps(tuple(self), pickle.HIGHEST_PROTOCOL))

    @classmethod
    def load(cls, state: bytes) -> Checkpoint:
        """Undoes `dump`; a ValueError if the bytes are not such a state."""
        try:
            return cls(*pickle.loads(zlib.decompress(state)))
        except Exception as error:
            raise ValueError(f"this is no state of WorkersReadingService: {type(error).__name__}: {error}") from error


def pack_runs(end: DataPipe, runs: Sequence[Run], fronts: Sequence[Any], graph: Any, *, in_epoch: bool) -> Any:
    """Packs where the streams of a reading service are; None if they begin anew with the next epoch.

    `end` is the last pipe of the main process, `fronts` stand there for the `runs`; `graph` is the last pipe of each
    stream of the first run.

    Raises:
        RuntimeError: if that cannot be known.
    """
    if not in_epoch and not any(run.streams.continues for run in runs):
        if any(has_epoch(end, front) for front in fronts):
            raise RuntimeError(_EPOCH_BEHIND)
        return None
    if len(runs) > 1:
        raise RuntimeError(
            f"a state cannot be taken of {len(runs)} sets of workers that are joined in the main process: join their "
            "streams in the workers, with one .join_workers() behind all"
        )
    (run,), (front,) = runs, fronts
    if has_epoch(end, front):
        raise RuntimeError(_EPOCH_BEHIND)
    taken = taken_by(end, front) if in_epoch else 0
    run.wait_for_facts()
    return pack_streams(graph, run.streams, taken)


def pack_streams(branch: IterDataPipe[Any], streams: Streams, taken: int) -> Any:
    """Packs where the streams of a graph are, once `taken` items of the epoch have been taken in all.

    Raises:
        RuntimeError: if that cannot be known.
    """
    chain = find_chain(branch)
    if len(chain.epochs) > 1:
        raise RuntimeError("there are several .wds_epoch() in one graph: where each of them is cannot be kept. Use one")
    if not all(facts.passes for facts in streams.facts):
        raise RuntimeError(
            "a state between epochs cannot be taken: a stage behind .wds_epoch() has not taken all items of the epoch, "
            "and how many it took is not known. Put .wds_epoch() behind it"
        )
    counts, order = streams.turns.at(taken)
    before, behind = chain.ratios
    facts = [
        pack_facts(facts, count * behind, before, len(counts))
        for facts, count in zip(streams.facts, counts, strict=True)
    ]
    return counts, order, facts


def unpack_streams(branch: IterDataPipe[Any], packed: Any, stream_seeds: Seeds, epoch: int) -> Streams:
    """Undoes `pack_streams`, and logs which items will be made again; `epoch` is the number that the log shows."""
    counts, order, facts = packed
    chain = find_chain(branch)
    facts = [unpack_facts(one) for one in facts]
    streams = Streams(len(counts), turns=Turns(counts, order), facts=facts, continues=bool(chain.epochs))
    skipping = sorted(set().union(*(one.skipping for one in facts)))
    obstacle = chain.obstacle
    if obstacle is None and skipping:
        obstacle = f"{' and '.join(skipping)} left out items"
    streams.restart(stream_seeds, obstacle is None)
    if chain.private:
        logger.warning(
            "functions of %s have random generators of their own, whose states are not kept: what they give may differ "
            "from here on. Let them draw from the generators of random, numpy or torch",
            " and ".join(chain.private),
        )
    place = f"resuming at item {sum(counts):,} of epoch {epoch}"
    if obstacle is None:
        logger.info("%s: the items before it are skipped", place)
    elif any(counts):
        logger.warning("%s: the items before it are made once more and dropped, because %s", place, obstacle)
    return streams


def taken_by(end: DataPipe, front: DataPipe) -> int:
    """Returns how many items of the workers, for whom `front` stands, went into those that `end` has delivered.

    Raises:
        RuntimeError: if a stage between them may hold items that it has not delivered.
    """
    taken: int = end._number_of_samples_yielded
    ((pipe, sources),) = traverse_dps(end).values()
    while pipe is not front:
        if type(pipe) is Batcher:
            taken *= pipe.batch_size
        elif (
            len(sources) == 1
            and not vars(pipe).get("skipped")
            and (is_one_to_one(pipe) or is_torchdata(pipe, "FullSync"))
        ):
            if has_functions(pipe):
                warn_once(
                    f"main {short_name(pipe)}",
                    f"a function of {short_name(pipe)} runs in the main process: what it draws at random is not kept "
                    "in states of the loader. Let it run in the workers, before .join_workers()",
                )
        else:
            raise RuntimeError(
                f"a state in the middle of an epoch cannot be taken: {short_name(pipe)}, which runs in the main "
                "process, may hold items that it has not delivered, or drop some. Let it run in the workers (before "
                ".join_workers()), or take the state between epochs"
            )
        ((pipe, sources),) = sources.values()
    return taken


def has_epoch(pipe: DataPipe, front: DataPipe) -> bool:
    """Returns whether a ``wds_epoch`` stands after the workers, in the main process."""
    ((found, sources),) = traverse_dps(pipe).values()
    while found is not front and sources:
        if getattr(type(found), "cuts_epochs", False):
            return True
        if len(sources) > 1:
            return any(has_epoch(source, front) for source, _ in sources.values())
        ((found, sources),) = sources.values()
    return False
