"""Draws graphs of pipes as text: one line a stage, from the sources to the end, with branches beside one another."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data.graph import DataPipe

from torchdata_wds.pipes.chain_text import chain_text, form_of, stage_text, written

__all__ = ["describe"]

_MOST_SOURCES = 8  # how many sources of one stage are drawn
_MOST_LINES = 200
_LOOKED_AT = 100  # how many items of a collection are searched for pipes
_DEEPEST = 2  # collections in collections: pairs of a pipe and its weight
_INDENT = "    "

#: Code of these packages puts reprs into messages, which stay on one line.
_MESSAGE_MAKERS = ("torch", "torchdata", "torchdata_wds", "logging")


def describe(pipe: DataPipe) -> str:
    """Draws the graph of any DataPipe, from its sources to `pipe`, one line a stage.

    Each stage has its functional name and the arguments that differ from their defaults. Secrets are masked, and long
    values cut. Branches are drawn beside one another, and a source that several share once. Nothing is iterated,
    pickled or opened.

    Args:
        pipe: The last pipe of the graph: of this package, torch, torchdata or your own.

    Raises:
        TypeError: if it is not a DataPipe.

    Example:
        >>> from torch.utils.data.datapipes.iter import IterableWrapper
        >>> from torchdata_wds import describe
        >>> texts, numbers = IterableWrapper(range(9)).fork(2)
        >>> print(describe(texts.map(str).zip(numbers).batch(4)))
        ● IterableWrapper(range(0, 9))
        ● .fork(2)
        ├─╮
        ● │ [0]
        ● │ .map(str)
        │ ● [1]
        ├─╯
        ● .zip()
        ● .batch(4)
    """
    if not isinstance(pipe, (IterDataPipe, MapDataPipe)):
        raise TypeError(f"describe takes the last pipe of a graph, a DataPipe, not {type(pipe).__name__}")
    return "\n".join(before + text for before, text in _lines(pipe))


def html_of(pipe: DataPipe) -> str:
    """Returns `describe` of a pipe as HTML, for notebooks: escaped, without scripts."""
    lines = []
    for before, text in _lines(pipe):
        name, bracket, arguments = text.partition("(")
        lines.append(before + (f"<b>{html.escape(name)}</b>{html.escape(bracket + arguments)}" if text else ""))
    return '<pre style="line-height: 1.2; overflow-x: auto">' + "\n".join(lines) + "</pre>"


def drawn(pipe: DataPipe, caller: str) -> str:
    """Returns ``repr()`` of a pipe, for a module that calls it."""
    return chain_text(pipe) if caller.partition(".")[0] in _MESSAGE_MAKERS else describe(pipe)


def _lines(pipe: DataPipe) -> list[tuple[str, str]]:
    """Returns the lines of a drawing: what is drawn before a stage, and its text."""
    try:
        stages = _stages(pipe)
        lines = list(_draw(stages))
        if all(before == _MARK for before, _ in lines):
            lines = [(_INDENT if stage.sources else "", text) for stage, (_, text) in zip(stages, lines, strict=True)]
    except Exception:  # noqa: BLE001  (a debugger may show a pipe whose constructor is still running)
        return [("", type(pipe).__qualname__)]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines[half:-half] = [("", f"... {len(lines) - 2 * half:,} lines more ...")]
    return lines


class _Stage(NamedTuple):
    """A pipe of a graph, and the pipes above it that are drawn, in their order."""

    pipe: DataPipe
    sources: list[DataPipe]
    text: str


def _stages(end: DataPipe) -> list[_Stage]:
    """Returns the pipes of a graph, each after its sources."""
    found: dict[int, list[DataPipe]] = {}
    stages: dict[int, _Stage] = {}
    waiting = [end]
    while waiting:  # not by recursion, for chains of a thousand stages
        pipe = waiting[-1]
        if id(pipe) not in found:
            found[id(pipe)] = list(written(_sources(pipe)))
            waiting += [source for source in found[id(pipe)][_MOST_SOURCES - 1 :: -1] if id(source) not in found]
            continue
        waiting.pop()
        if id(pipe) not in stages:
            all_sources = found[id(pipe)]
            # In a cycle of attributes, the pipe that is reached again is not a source.
            drawn = [source for source in all_sources[:_MOST_SOURCES] if id(source) in stages]
            stages[id(pipe)] = _Stage(pipe, drawn, _text_of(pipe, all_sources))
    return list(stages.values())


def _sources(pipe: DataPipe) -> list[DataPipe]:
    """Returns the pipes that a pipe holds; one that is in several attributes counts once."""
    found: list[DataPipe] = []
    for value in list(vars(pipe).values()):
        seen = set(map(id, found))
        found += [source for source in _pipes_in(value, _DEEPEST) if id(source) not in seen]
    return found


def _pipes_in(value: Any, depth: int) -> Iterator[DataPipe]:
    if isinstance(value, (IterDataPipe, MapDataPipe)):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for item in islice(value, _LOOKED_AT):
            yield from _pipes_in(item, depth - 1)
        if isinstance(value, dict):
            for item in islice(value.values(), _LOOKED_AT):
                yield from _pipes_in(item, depth - 1)


def _text_of(pipe: DataPipe, sources: Sequence[DataPipe]) -> str:
    try:
        text = stage_text(pipe, drawn=set(map(id, [*sources, *_sources(pipe)])))
    except Exception:  # noqa: BLE001  (as for the whole graph, but the other stages are shown)
        text = f"{type(pipe).__qualname__}(...)"
    if (form := form_of(pipe)[0]) and text.startswith(f"{form}("):
        text = f".{text}"
    more = len(sources) - _MOST_SOURCES
    return text if more <= 0 else f"{text} and {more:,} more sources"


_MARK = "● "


def _draw(stages: Sequence[_Stage]) -> Iterator[tuple[str, str]]:
    """Yields the lines of a graph, in which each pipe's items flow down a lane to the stages that take them."""
    # For a zip of two chains, lane 0 holds the id of the first one's end, while the second is drawn in lane 1. Then the
    # zip takes both: a line joins lane 1 to lane 0, where the zip is drawn. A pipe that two stages take, as after fork,
    # gets a second lane.
    uses = Counter(id(source) for stage in stages for source in stage.sources)
    lanes: list[int | None] = []
    for stage in stages:
        taken = _take(lanes, stage.sources)
        place = min(taken, default=_free(lanes, 0))
        others = [lane for lane in taken if lane != place]
        if others:
            yield _border(lanes, place, others, "┴╯"), ""
        for lane in others:
            lanes[lane] = None
        while lanes and lanes[-1] is None:
            lanes.pop()
        own = id(stage.pipe)
        _set(lanes, place, own)
        yield "".join(_MARK if lane == place else _lane(lanes, lane) for lane in range(len(lanes))), stage.text
        if not uses[own]:
            lanes[place] = None
        new = []
        for _ in range(uses[own] - 1):
            new.append(_free(lanes, place + 1))
            _set(lanes, new[-1], own)
        if new:
            yield _border(lanes, place, new, "┬╮"), ""


def _take(lanes: Sequence[int | None], sources: Sequence[DataPipe]) -> list[int]:
    """Returns the lanes in which the items of sources arrive, one for each."""
    taken: list[int] = []
    for source in sources:
        taken.append(next(lane for lane, held in enumerate(lanes) if held == id(source) and lane not in taken))
    return taken


def _free(lanes: Sequence[int | None], first: int) -> int:
    return next((lane for lane in range(first, len(lanes)) if lanes[lane] is None), max(first, len(lanes)))


def _set(lanes: list[int | None], lane: int, held: int) -> None:
    lanes.extend([None] * (lane + 1 - len(lanes)))
    lanes[lane] = held


def _lane(lanes: Sequence[int | None], lane: int) -> str:
    return "  " if lanes[lane] is None else "│ "


def _border(lanes: Sequence[int | None], place: int, others: Sequence[int], ends: str) -> str:
    """Draws the line that connects a lane with others to its right, whose last one ends it."""
    last = max(others)
    parts = []
    for lane in range(len(lanes)):
        if lane == place:
            parts.append("├─")
        elif lane in others:
            parts.append(ends[1] + " " if lane == last else ends[0] + "─")
        elif place < lane < last:
            parts.append("──" if lanes[lane] is None else "│─")
        else:
            parts.append(_lane(lanes, lane))
    return "".join(parts).rstrip()
