"""Writes the figures of a loader as tables of text, at most 100 columns wide."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import fields

from torchdata_wds.workers.stats.figures import At, Figures, SourceFigures, StageFigures, WorkerFigures
from torchdata_wds.workers.stats.reports.amounts import (
    WIDTH,
    cut_text,
    rate_text,
    seconds_text,
    share_text,
    size_text,
    table_lines,
)
from torchdata_wds.workers.stats.reports.cases import load_of

_LONGEST_NAME = 40
_MOST_WORKERS = 8
_PARTS = ("busy", "reading", "sending", "blocked", "idle", "cpu", "awaited")  # of a worker's time
_HERE = ("busy", "reading", "idle", "cpu")  # of that of the main process


def report_lines(total: Figures, recent: Figures, *, is_here: bool) -> list[str]:
    """Writes the tables of an epoch and of its recent stretch: the loop, its workers, stages and sources.

    `is_here` if there are no workers, so that the main process has their figures.
    """
    stretches = [total] if recent == total else [total, recent]
    tables = [_loop_lines(stretches), _worker_lines(total, is_here=is_here), _stage_lines(total), _source_lines(total)]
    return [line for lines in tables if lines for line in ("", *lines)][1:]


def wrapped(text: str) -> list[str]:
    """Breaks a sentence into lines, but not between a number and its unit."""
    kept = re.sub(r"(\d) (%|[KMGTP]?B\b|[mu]?s\b|min\b|h\b)", "\\1\xa0\\2", text)
    lines = textwrap.wrap(kept, WIDTH, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _loop_lines(stretches: Sequence[Figures]) -> list[str]:
    header = ["", "epoch", "since the last call"][: len(stretches) + 1]
    rows = [
        ["seconds", *(seconds_text(found.seconds) for found in stretches)],
        ["items", *(f"{found.items:,}" for found in stretches)],
        ["items/s", *(rate_text(found.items, found.seconds) for found in stretches)],
        ["samples/s", *(rate_text(found.samples, found.seconds) for found in stretches)],
        ["read", *(f"{_speed(found.bytes, found.seconds)}" for found in stretches)],
        ["training loop waits", *(share_text(found.waits.share) for found in stretches)],
        ["  for the first item", *(seconds_text(found.waits.first) for found in stretches)],
        ["  p50", *(seconds_text(found.waits.p50) for found in stretches)],
        ["  p99", *(seconds_text(found.waits.p99) for found in stretches)],
        ["messages found ready", *(_of(found.found_ready, found.asked) for found in stretches)],
    ]
    return table_lines(header, [row for row in rows if set(row[1:]) != {""}])


def _speed(count: float, seconds: float) -> str:
    return f"{size_text(count / seconds)}/s" if seconds > 0 else "-"


def _of(part: int, whole: int) -> str:
    return share_text(part / whole) if whole else ""


def _worker_lines(figures: Figures, *, is_here: bool) -> list[str]:
    workers, seconds = figures.workers, figures.seconds
    if not workers or not seconds:
        return []
    names = _HERE if is_here else _PARTS
    rows = [_worker_row(worker, seconds, names) for worker in _shown(workers)]
    if is_here:
        rows[0][0] = "main"
    if len(workers) > 1:
        rows.append(_sum_row(workers, seconds, names))
    return table_lines(["process" if is_here else "worker", *names, "items", "is at"], rows, has_texts=True)


def _shown(workers: Sequence[WorkerFigures]) -> list[WorkerFigures]:
    """Returns all workers if they are few, else those that worked most and least."""
    if len(workers) <= _MOST_WORKERS:
        return list(workers)
    ordered = sorted(workers, key=load_of)
    half = _MOST_WORKERS // 2
    return sorted(ordered[:half] + ordered[-half:], key=lambda worker: worker.number)


def _worker_row(worker: WorkerFigures, seconds: float, names: Sequence[str]) -> list[str]:
    idle = max(seconds - load_of(worker) - worker.blocked, 0.0)
    parts = [idle if name == "idle" else getattr(worker, name) for name in names]
    return [str(worker.number), *(share_text(part / seconds) for part in parts), f"{worker.items:,}", _at(worker.at)]


def _sum_row(workers: Sequence[WorkerFigures], seconds: float, names: Sequence[str]) -> list[str]:
    summed = [found.name for found in fields(WorkerFigures) if found.name not in ("number", "at")]
    whole = WorkerFigures(0, **{name: sum(getattr(worker, name) for worker in workers) for name in summed})
    return [f"all {len(workers)}", *_worker_row(whole, seconds * len(workers), names)[1:]]


def _at(at: At | None) -> str:
    if at is None or not at.stage:
        return ""
    parts = [cut_text(at.stage, 24)]
    if at.shard:
        parts.append(cut_text(at.shard.rpartition("/")[2], 24))
    return ", ".join(parts)


def _stage_lines(figures: Figures) -> list[str]:
    whole = sum(stage.seconds for stage in figures.stages)
    rows = [_stage_row(stage, whole) for stage in figures.stages if not stage.stage.startswith("_")]  # loaders' own
    return table_lines(["stage", "in", "out", "time", "share", "skipped"], rows, has_texts=True) if rows else []


def _stage_row(stage: StageFigures, whole: float) -> list[str]:
    name = cut_text(stage.stage, _LONGEST_NAME - 7 * stage.in_main) + " (main)" * stage.in_main
    share = share_text(stage.seconds / whole) if whole else "-"
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in stage.skipped.items())
    return [name, _count(stage.items_in), _count(stage.items_out), seconds_text(stage.seconds), share, skipped]


def _count(items: int | None) -> str:
    return "" if items is None else f"{items:,}"


def _source_lines(figures: Figures) -> list[str]:
    rows = [_source_row(source, figures.seconds) for source in figures.sources]
    header = ["source", "shards", "read", "per second", "first byte", "waited", "retries", "cached"]
    return table_lines(header, rows) if rows else []


def _source_row(source: SourceFigures, seconds: float) -> list[str]:
    found = source.hits + source.misses
    return [
        source.source,
        f"{source.shards:,}",
        size_text(source.bytes),
        _speed(source.bytes, seconds),
        seconds_text(source.first_byte),
        seconds_text(source.waited),
        f"{source.retries:,}",
        f"{source.hits:,} of {found:,}" if found else "",
    ]
