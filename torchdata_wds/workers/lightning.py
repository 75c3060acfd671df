"""Finds out from the calling frames where Lightning's fit loop is, so that a state matches what was trained on.

When Lightning saves a state, it may have taken more batches than it has trained on: one ahead if the length is unknown,
and the one whose training failed. If the length is known, it never requests the end of an epoch. It does not load a
state that was saved at the end of an epoch, and with several ranks it saves only the states of rank 0.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils.data import IterDataPipe

from torchdata_wds.handlers import warn_once
from torchdata_wds.process_place import distributed_place, rank_place
from torchdata_wds.workers.engine import Engine
from torchdata_wds.workers.ranks import RankDivision
from torchdata_wds.workers.resume.checkpoints import Checkpoint
from torchdata_wds.workers.resume.job_order import find_order

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_COMBINED = tuple(f"{package}.utilities.combined_loader" for package in _PACKAGES)
_FIT_LOOP = tuple(f"{package}.loops.fit_loop" for package in _PACKAGES)
_CALLS = tuple(f"{package}.trainer.call" for package in _PACKAGES)


class Position(NamedTuple):
    """Where training is, compared with what was taken from the loader."""

    ahead: int = 0  # how many items were taken, but not trained on
    is_over: bool = False  # whether no more items are taken in this epoch


def position() -> Position | None:
    """Returns where training is, if Lightning's fit loop is saving the state of the calling loader."""
    loop = _calling_loop("on_save_checkpoint")
    if loop is None:
        return None
    try:
        return _position_in(loop)
    except AttributeError as error:
        warn_once(
            "lightning",
            f"this version of Lightning is not known to torchdata_wds ({error}): a resumed run may miss a batch that "
            "Lightning has taken ahead. Give the loader a length",
        )
        return Position()


def _position_in(loop: Any) -> Position:
    fetcher, progress = loop._data_fetcher, loop.epoch_loop.batch_progress
    if fetcher is None:  # after fit()
        counts = loop.epoch_progress.current
        if counts.ready == counts.processed:
            return Position(is_over=True)
        return Position(int(loop.max_batches == float("inf") and not progress.is_last_batch))
    if "DataLoaderIter" in type(fetcher).__name__:  # a training step that takes its batches itself
        return Position()
    # A batch that was being fetched when an exception was raised is counted, but is not in `batches`; while a run
    # resumes, what it had fetched before is in `batches`, but not yet counted.
    ahead = max(fetcher.fetched - progress.current.processed, len(getattr(fetcher, "batches", ())))
    return Position(ahead, fetcher.done and not ahead)


def checkpoint_at(position: Position | None, engine: Engine, delivered: int) -> Checkpoint:
    """Returns the state of a loader that has delivered this many items since its epoch began or was resumed."""
    ahead, is_over = position or Position()
    checkpoint = engine.checkpoint(delivered - ahead if ahead <= delivered else delivered)
    # Streams that continue in the next epoch do so where they are.
    if is_over and not any(run.streams.continues for run in engine.graph.runs):
        return checkpoint._replace(in_epoch=False, streams=None)
    return checkpoint


def skipped_state(loader: object) -> Any:
    """Returns the state that Lightning holds for a loader but does not load, or None.

    It does not load a state that was saved at the end of an epoch: the loader would start again with epoch 0.
    """
    loop = _calling_loop("setup_data")
    if loop is None or loop.restarting or not getattr(loop, "is_resuming", True):
        return None
    states = getattr(loop, "_combined_loader_states_to_load", ())
    stateful = [one for one in loop._combined_loader.flattened if hasattr(one, "load_state_dict")]
    if len(states) != len(stateful):
        return None
    return next((state for one, state in zip(stateful, states, strict=True) if one is loader), None)


def recount(pipe: IterDataPipe[Any], ranks: RankDivision, position: int | None) -> None:
    """Makes Lightning count the batches of a resumed epoch as this run makes them; `position` is None after its end.

    It goes on with the count of the run that saved the state, and ends the epoch at the loader's length. With other
    ranks or another batch size, samples would be left: of this epoch, or of the next one if this is over.
    """
    loop = _calling_loop("_load_combined_loader_states")
    if loop is None or (order := find_order(pipe)) is None:
        return
    place, counts = ranks.find(pipe), loop.epoch_loop.batch_progress.current
    if not counts.ready:  # no epoch had begun
        return
    # Of 63 samples, a run with batches of 4 has trained on 5. With batches of 8 there are 8, of which 6 are left: 2
    # are done, and 3 must be subtracted from the counts.
    done = order.count_items(place)
    if position is None:
        done = min(done, *loop._combined_loader.limits)
    else:
        done -= order.count_items(place, position)
    shift = done - counts.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(counts, name, getattr(counts, name) + shift)


def is_dropped(loader: object, delivered: int) -> bool:
    """Returns whether Lightning restarts an epoch of which it has taken `delivered` items and trained on none.

    It does so after it has resumed at the end of an epoch and fetched ahead from the next one.
    """
    loop = _calling_loop("advance")
    if loop is None or not any(one is loader for one in loop._combined_loader.flattened):
        return False
    return 0 < delivered == len(getattr(loop._data_fetcher, "batches", ()))


def gathered(state: dict[str, Any]) -> dict[str, Any]:
    """Adds the states of all ranks, because frameworks save only that of rank 0; all ranks must call this."""
    if distributed_place() is None or dist.get_world_size() == 1 or _failed_alone():
        return state
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return {**state, "ranks": states}


def own_state(state: Any) -> Any:
    """Returns this rank's part of a state that holds those of all ranks."""
    ranks = state.get("ranks") if isinstance(state, Mapping) else None
    place = rank_place()
    return ranks[place.number] if isinstance(ranks, list) and len(ranks) == place.consumers else state


def _failed_alone() -> bool:
    """Returns whether Lightning saves because of an exception that other ranks may not have; SIGTERM reaches all."""
    for frame in _callers():
        if frame.f_code.co_name == "_interrupt" and frame.f_globals.get("__name__") in _CALLS:
            return type(frame.f_locals.get("exception")).__name__ != "SIGTERMException"
    return False


def _calling_loop(method: str) -> Any:
    """Returns the fit loop that is in this method, if its CombinedLoader calls the loader; None otherwise."""
    if not any(package in sys.modules for package in _PACKAGES):
        return None
    is_combined = False
    for distance, frame in enumerate(islice(_callers(), 2, 20)):
        module = frame.f_globals.get("__name__")
        is_combined = is_combined or module in _COMBINED
        if is_combined and module in _FIT_LOOP and frame.f_code.co_name == method:
            return frame.f_locals.get("self")
        if not is_combined and distance > 3:  # the loader's own methods
            return None
    return None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
