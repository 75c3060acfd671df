"""Divides the positions of an epoch among ranks and workers: arithmetic that any grid continues at any position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchdata_wds.option_types import Even


class Share(NamedTuple):
    """Which consumer reads: worker `worker` of `workers` (0 if the rank reads itself) on rank `rank` of `ranks`."""

    ranks: int = 1
    rank: int = 0
    workers: int = 1
    worker: int = 0


class Block(NamedTuple):
    """Positions `start` to `stop` (exclusive), all in one item; padding repeats samples that come elsewhere too."""

    start: int
    stop: int
    padding: bool = False


def blocks(total: int, base: int, share: Share, block: int, even: Even = None) -> Iterator[Block]:
    """Yields what a consumer reads of the positions from `base` to `total`, in order.

    An item is `block` samples of one rank; a step is one item on each rank; a rank's workers take its items in turn.
    So all grids read the positions in the same order. The last step may be incomplete: with None the first ranks have
    the rest; ``"drop"`` divides it equally and leaves out at most ``ranks - 1`` samples; ``"pad"`` also divides it
    equally, and repeats at most ``ranks - 1`` samples from position 0 on: such an item may have several blocks.

    Example:
        >>> [tuple(block) for block in blocks(10, 0, Share(ranks=2, rank=1), 3, "pad")]
        [(3, 6, False), (8, 10, False)]
    """
    workers = max(share.workers, 1)
    step = share.ranks * block
    full_steps = max(total - base, 0) // step
    first = base + share.rank * block
    for number in range(share.worker, full_steps, workers):
        yield Block(first + number * step, first + number * step + block)
    if full_steps % workers == share.worker:
        yield from _last_step(total, base + full_steps * step, share, block, even)


def _last_step(total: int, base: int, share: Share, block: int, even: Even) -> Iterator[Block]:
    rest = max(total - base, 0)
    # 8 samples remain for 3 ranks with blocks of 5. None: 5, 3 and 0. "drop": 2 each, and 2 are left out. "pad": 3
    # each, and the last rank has the 2 samples that remain and repeats the one at position 0.
    each = {None: block, "drop": rest // share.ranks, "pad": -(-rest // share.ranks)}[even]
    start = base + share.rank * each
    stop = start + each
    if start < (end := min(stop, total)):
        yield Block(start, end)
    place = max(start, total)
    while even == "pad" and place < stop:  # more than once round where samples are fewer than ranks
        first = (place - total) % total
        length = min(stop - place, total - first)
        yield Block(first, first + length, padding=True)
        place += length


def count_samples(total: int, base: int, share: Share, block: int, even: Even = None) -> int:
    """Returns how many samples a consumer reads, padding included, without going through its blocks."""
    workers = max(share.workers, 1)
    step = share.ranks * block
    full_steps = max(total - base, 0) // step
    count = len(range(share.worker, full_steps, workers)) * block
    if full_steps % workers == share.worker:
        last = _last_step(total, base + full_steps * step, share, block, even)
        count += sum(block.stop - block.start for block in last)
    return count


def step_end(total: int, base: int, ranks: int, block: int, items: int) -> int:
    """Returns the position up to which all is read once each rank has read `items` items from `base` on."""
    return max(base, min(base + items * ranks * block, total))
