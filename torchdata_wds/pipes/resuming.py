"""How pipes answer for themselves when a stream is to go on in the middle of an epoch.

A pipe says in its own class, by these attributes, what resuming may rely on:

- ``one_to_one = True``: it gives one item for each that it takes, and counts in ``skipped`` those that it leaves out;
- ``repeats_shards = True``: before the loader, it gives the same shards again at no cost;
- the methods of `Step`: it takes several items for one, or reorders them, in a way that can be computed;
- ``makes_samples = True``: items are counted from here on.

A pipe that says nothing is replayed: its items are made once more and dropped. What a class says does not count for
the subclasses that users derive from it, which may do anything: they say it themselves. Native pipes, which cannot say
anything, have a table in `torchdata_wds.workers.resume.planner`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torchdata_wds.pipes.resume_facts import Facts, Wanted


class Way(NamedTuple):
    """What is known of a stream that goes on.

    Attributes:
        facts: What its pipes have told.
        passing: The pass that it goes on with.
        share: How many items ``wds_epoch`` gives in the epoch; 0 without one.
        length: How many items the step's source gives in the pass; None where it has not ended.
    """

    facts: Facts
    passing: int
    share: int
    length: int | None = None


class Step:
    """A stage between the grouping and the end of a stream that does not simply give one item for one.

    Attributes:
        ratio: How many items it takes for one.
        reorders: Whether it gives items in another order.
        cuts_epochs: Whether the stream goes on through it from epoch to epoch.
    """

    ratio = 1
    reorders = False
    cuts_epochs = False

    def obstacle(self) -> str | None:
        """Says why items cannot be skipped through it; None where they can."""
        return None

    def resume(self, wanted: Wanted, way: Way) -> tuple[Wanted, Way] | None:
        """Lets the next iteration give only some of its items.

        Returns:
            The items of its source that this takes, and the way as the stages before it see it; None where not enough
            is known.
        """
        raise NotImplementedError

    def undo(self) -> None:
        """Takes back a `resume`: the next iteration begins at the beginning."""

    def taken(self, item: int, way: Way) -> tuple[int, Way] | None:
        """Returns how many items it had taken, at least, when it had given `item`, and the way before it."""
        return item, way

    def length_of(self, source: int) -> int:
        """Returns how many items it gives of `source` items."""
        return source


def said_by(pipe: Any, name: str) -> Any:
    """Returns what a pipe's class says about itself under a name; None where it says nothing.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> said_by(IterableWrapper([1]).wds_shuffle(), "repeats_shards")
        True
        >>> said_by(IterableWrapper([1]), "one_to_one") is None
        True
    """
    kind = type(pipe)
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith("torchdata_wds.") else None
    is_own = getattr(module, kind.__qualname__, None) is kind
    return getattr(kind, name, None) if is_own or name in vars(kind) else None
