"""Where the stream of a worker that was lost goes on: at its first item that was not taken."""

from __future__ import annotations

import logging

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes.order.ordered_pipe import OrderPoint
from torchdata_wds.pipes.resume_facts import Facts, PassBegun
from torchdata_wds.pipes.seeds import Seeds
from torchdata_wds.workers.resume.checkpoints import Streams
from torchdata_wds.workers.resume.job_order import OrderedStreams
from torchdata_wds.workers.resume.packed_facts import pack_facts, unpack_facts
from torchdata_wds.workers.resume.planner import find_chain
from torchdata_wds.workers.resume.stream import Point

logger = logging.getLogger(__name__)


def point_of(
    part: IterDataPipe[object], streams: Streams, worker: int, stream_seeds: Seeds
) -> Point | OrderPoint | None:
    """Returns where the stream of a worker goes on, as a saved state would; None if it has not begun.

    `part` is the graph that workers run, and `stream_seeds` are those of the epoch in which its streams began.
    """
    if isinstance(streams, OrderedStreams):
        return streams.point_of(worker)
    (counts, order), facts = streams.turns.at(streams.taken), streams.facts[worker]
    is_over = worker not in order  # nothing is taken from it any more in this epoch, and so no reports
    if not counts[worker] and not streams.continues and streams.restart is None:
        facts.skips = facts.skips if is_over else []
        return None
    if not facts.passes:
        # Only the worker knew where it continued, since the epoch before was left early.
        logger.warning("worker %d was lost between two epochs: the passes of its wds_epoch start over", worker)
        facts.passes = [PassBegun(0, 0)]
        return Point(0, stream_seeds, Facts([PassBegun(0, 0)]), False)
    chain = find_chain(part)
    before, after = chain.ratios
    kept = unpack_facts(pack_facts(facts, counts[worker] * after, before, 1))
    skips = chain.obstacle is None and not kept.skipping
    if not (skips or is_over):
        facts.skips = []  # all items are made again, and so are the reports of what they skip
    return Point(counts[worker], stream_seeds if streams.restart is None else streams.restart[0], kept, skips)
