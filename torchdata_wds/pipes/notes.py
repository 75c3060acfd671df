"""Adds a note to an exception of a user's function: the stage, its functions and the sample."""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import Any

from torch.utils.data import IterDataPipe

from torchdata_wds.errors import WdsError
from torchdata_wds.format.tar.members import ShardMember
from torchdata_wds.pipes.chain_text import form_name, sources_of, stage_text
from torchdata_wds.pipes.samples.field_specs import name_sample
from torchdata_wds.storage import mask_url


class Latest:
    """Remembers the sample from which a stage made its last item, if the item itself does not name it."""

    __slots__ = ("sample",)

    def __init__(self) -> None:
        self.sample: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Latest, ()  # a copy of a pipe has made nothing yet

    def __repr__(self) -> str:
        return "Latest()"


def note_failure(error: BaseException, pipe: IterDataPipe[Any], item: Any = None, part: str | None = None) -> None:
    """Adds a note with the stage (or the `part` of it that failed) and the sample of `item`, unless it has one."""
    if isinstance(error, WdsError) and (error.key is not None or error.shard is not None):
        return  # the package's own exceptions name their sample themselves
    with suppress(Exception):  # the repr of a user's object may raise anything
        form = form_name(pipe)
        if any(note.startswith(form + "(") for note in getattr(error, "__notes__", [])):
            return
        stage = stage_text(pipe, without=("handler",)) if part is None else f"{form}({part})"
        place = _place(item) or _place(_latest(pipe))
        error.add_note(f"{stage} failed at {place}" if place else f"{stage} failed")


def note_source_failure(error: BaseException, pipe: IterDataPipe[Any] | None = None) -> None:
    """Adds a note to an exception caught by `pipe`, with the innermost pipe of its traceback and that one's sample."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    first = 0
    for number, frame in enumerate(frames):
        if (stage := _stage_of(frame.f_locals.get("self"))) is not None:
            pipe, first = stage, number
    if pipe is not None:
        # A user's generator function in wds_compose has the sample in its own frame, inside the pipe's.
        values = (value for frame in frames[first : first + 4] for value in reversed(frame.f_locals.values()))
        note_failure(error, pipe, next((value for value in values if _place(value)), None))


def _stage_of(worker: Any) -> IterDataPipe[Any] | None:
    """Returns the pipe that an object is, or works for."""
    if isinstance(worker, IterDataPipe):
        return worker
    with suppress(Exception):  # a user's object may raise anything
        if isinstance(worker.stage, IterDataPipe):
            return worker.stage
    return None


def _latest(pipe: IterDataPipe[Any]) -> Any:
    """Returns the sample from which a stage above made its item, if all stages between yield one item for each."""
    while len(sources := sources_of(pipe)) == 1:
        (pipe,) = sources
        latest = vars(pipe).get("_latest")
        if latest is None and type(pipe).__name__ != "MapperIterDataPipe":
            return None
        if latest is not None and latest.sample is not None:
            return latest.sample
    return None


def _place(item: Any) -> str | None:
    """Names the sample, member or batch that an item is; None if it is not one of them."""
    if isinstance(item, dict) and "__key__" in item:
        return name_sample(item)[0]
    if isinstance(item, ShardMember):
        return f"member {item.name!r} of shard {mask_url(item.url)}"
    if isinstance(item, list) and item and all(isinstance(part, dict) and "__key__" in part for part in item):
        return f"a batch of {len(item)} samples, {name_sample(item[0])[0]} to {name_sample(item[-1])[0]}"
    return None
