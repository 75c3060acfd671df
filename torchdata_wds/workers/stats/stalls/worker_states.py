"""What is known about workers while the training loop waits for them, as text."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from torchdata_wds.workers.stats.figures import At
from torchdata_wds.workers.stats.stalls.stack_text import Stack, place_in, shortened, stacks_in, working

logger = logging.getLogger(__name__)
_MOST_GROUPS = 8


class WorkerState(NamedTuple):
    """What is known about a worker while the training loop waits."""

    process: int | None
    note: str = ""  # why there is no stack
    dump: str = ""  # as ``faulthandler`` has written it
    at: At | None = None
    place: str = ""  # where it runs, if elsewhere


States = Callable[[], list[WorkerState]]


def describe(states: list[WorkerState], first: int, waited: float) -> str:
    """Returns what each worker is at; workers that are at the same place share their stack.

    Number `first`, for which the training loop has waited for some seconds, comes first.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for number in sorted(range(len(states)), key=lambda number: number != first):
        state = states[number]
        if number == first and state.at is not None:  # what it last said may be old
            state = state._replace(at=At(state.at.stage, state.at.shard, state.at.byte, max(waited, state.at.seconds)))
        name = f"worker {number} (pid {state.process}{state.place})" if state.process else f"worker {number}"
        heading, stacks = _described(name, state)
        groups.setdefault(tuple(stacks), []).append(heading)
    lines = [line for stacks, headings in [*groups.items()][:_MOST_GROUPS] for line in (*headings, *stacks)]
    others = sum(map(len, [*groups.values()][_MOST_GROUPS:]))
    return "\n".join([*lines, *([f"and {others} other workers"] if others else [])])


def describe_main(state: WorkerState) -> str:
    """Returns what the stages in the main process are at."""
    heading, stacks = _described(f"main process (pid {state.process})", state, in_main=True)
    return "\n".join([heading, *stacks])


def _described(name: str, state: WorkerState, *, in_main: bool = False) -> tuple[str, list[str]]:
    """Returns the heading and the stacks of a process."""
    if state.dump:
        logger.debug("all stacks of %s:\n%s", name, state.dump)
    stacks = working(stacks_in(state.dump), in_main=in_main)
    text = "; ".join(filter(None, [_progress(state.at), state.note or place_in(stacks)]))
    return f"{name}: {text}", [f"  {line}" for line in _lines(stacks)]


def _lines(stacks: list[Stack]) -> list[str]:
    return [line for number, stack in enumerate(stacks) for line in (*_title(number), *shortened(stack))]


def _title(number: int) -> list[str]:
    return ["  another thread:"] if number else []


def _progress(at: At | None) -> str:
    if at is None or not at.stage:
        return ""
    shard = f", {at.shard} at byte {at.byte:,}" if at.shard else ""
    return f"{at.stage}{shard}, for {at.seconds:.0f} s"
