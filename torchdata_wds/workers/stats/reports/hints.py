"""Chooses what to try, each only where the figures and the graph back it."""

from __future__ import annotations

import math
from typing import Literal

from torchdata_wds.storage.meters import GIVEN_STREAMS, LOCAL_FILES, STANDARD_INPUT
from torchdata_wds.workers.stats.figures import SourceFigures, StageFigures
from torchdata_wds.workers.stats.reports.cases import Case

Hint = Literal[
    "workers",  # more of them
    "fewer_workers",
    "fast",  # the extra
    "read_ahead",
    "larger_shards",
    "cache_shards",
    "max_size",
    "batch",  # in the workers
    "collate",  # the batches
    "prefetch_factor",
    "even_shards",  # as many for each worker
    "move_stage",  # one that follows .join_workers(), into the workers
]

_NEAR = ("", LOCAL_FILES, STANDARD_INPUT, GIVEN_STREAMS)  # sources that nothing makes faster
_SMALL_SHARD = 16 << 20
_LOADERS = ("load_", "group_by_key(")  # they unpack shards


def source_hints(case: Case, source: SourceFigures, *, is_late: bool) -> list[Hint]:
    """Returns what helps against waiting for a source; `is_late` if it is the first byte that is waited for."""
    is_remote, options = source.source not in _NEAR, case.options
    hints: list[Hint] = []
    if is_remote and not options.get("read_ahead", 0):
        hints.append("read_ahead")
    if is_late and source.shards and source.bytes / source.shards < _SMALL_SHARD:
        hints.append("larger_shards")
    if is_remote and case.epoch and not source.hits and not options.get("caches", 0):
        hints.append("cache_shards")
    return hints


def stage_hints(case: Case, stage: StageFigures) -> list[Hint]:
    """Returns what makes a stage faster, if the graph or the installation lacks it."""
    options, decodes = case.options, "decode(" in stage.stage
    is_slow_jpeg = decodes and options.get("arrays", 0) and not options.get("simplejpeg", 1)
    is_slow_gzip = stage.stage.startswith(_LOADERS) and case.reads_gzip and not options.get("isal", 1)
    hints: list[Hint] = ["fast"] if is_slow_jpeg or is_slow_gzip else []
    if decodes and options.get("images", 0) and options.get("shrinks", 0) and not options.get("limits", 1):
        hints.append("max_size")
    return hints


def transport_hints(case: Case) -> tuple[Hint, ...]:
    """Returns what makes items cheaper to send: few large arrays instead of many objects."""
    if not case.options.get("batches", 0):
        return ("batch",)
    return () if case.options.get("collates", 1) else ("collate",)


def enough_workers(case: Case) -> int:
    """Returns the number of workers with which the training loop would not wait; 0 if there is no room for more."""
    waits = case.waits
    if case.count:
        # They make an item in the loop's whole turn now, and should in the time of a training step.
        wanted = math.ceil(case.count / max(1 - case.share, 0.01))
    else:
        wanted = math.ceil(waits.waited / waits.elsewhere) if waits.elsewhere else case.cpus
    room = 4 * max(case.count, 1)
    computing = case.computing
    if case.is_loaded and case.busy > case.reading:
        computing = 1.0  # it may only seem to sleep
    if computing > 0.3 and not case.is_pool:
        # One processor stays for the training loop, where there are several.
        room = math.floor(max(case.cpus - 1, 1) / computing)
    found = min(max(wanted, 1), room)
    return found if found > case.count else 0
