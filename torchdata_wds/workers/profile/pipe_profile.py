"""What `profile_pipe` returns: plain figures, a table of them, and what they mean."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torchdata_wds.workers.stats.reports.amounts import rate_text, seconds_text, share_text, size_text, table_lines
from torchdata_wds.workers.stats.reports.report import wrapped

_GAIN = 1.1  # how much faster more workers must be to be worth naming
_NOTED = 0.1  # a share of the time that is worth naming
_DISTURBED = 0.25  # the share of the processors that others may keep busy


@dataclass(frozen=True)
class StageProfile:
    """One stage in one process; stages that run as one loop, such as loading and grouping, are one."""

    stage: str  # as it is written in a chain, without secrets
    items: int  # that it yielded in the measured time
    seconds: float  # of its own, without the stages before it
    reading: float  # those of them in which it waited for a source, or read it
    share: float  # of the time of all stages, from 0 to 1
    seconds_per_item: float | None  # of its own, per item that it yielded; None if it yielded none
    rate: float | None  # items per second if the graph ended here
    in_thread: bool  # whether it ran in a thread beside the last stage, as before `prefetch`


@dataclass(frozen=True)
class WorkersProfile:
    """A run of the whole graph by `WdsLoader` with a number of workers; None is what the system does not tell."""

    workers: int
    items: int  # in the measured time
    seconds: float  # that were measured, without the start
    rate: float  # items per second
    first: float  # seconds to the first item, with the start of the workers
    processors: float | None  # how many were busy on average, in all processes
    others: float | None  # how many other programs of the machine kept busy
    main_memory: int | None  # the most bytes that were resident in the main process
    worker_memory: int | None  # the same of the worker that had the most
    memory: int | None  # bytes of all processes; those that they share, such as libraries, count once


@dataclass(frozen=True)
class PipeProfile:
    """How fast a graph is on this machine: what `profile_pipe` returns.

    Attributes:
        processors: How many processors this process may use.
        seconds: How long the profile took.
        samples_per_item: How many samples were read for an item of the graph, such as a batch; None if not known.
        stages: In one process, in the order of the graph, sources first.
        outside: The share of the time, from 0 to 1, that the loader itself took.
        runs: By the number of workers.
        step_rate: How many batches a second the training step takes, if one was given.
    """

    processors: int
    seconds: float
    samples_per_item: float | None
    stages: tuple[StageProfile, ...]
    outside: float
    runs: tuple[WorkersProfile, ...]
    step_rate: float | None = None

    @property
    def slowest(self) -> StageProfile:
        """The stage that takes most of the time."""
        return max(self.stages, key=lambda stage: stage.share)

    @property
    def fastest(self) -> WorkersProfile | None:
        """The run with the fewest workers among those that are about as fast as the fastest."""
        best = max((run.rate for run in self.runs), default=0.0)
        return next((run for run in self.runs if run.rate * _GAIN >= best), None)

    @property
    def headroom(self) -> float | None:
        """How many times the training step's rate the loader reaches; below 1, training waits for data."""
        return self.fastest.rate / self.step_rate if self.fastest and self.step_rate else None

    def to_plain(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, texts and numbers, which JSON takes."""
        return {**asdict(self), "headroom": self.headroom, "judgement": self.judgement()}

    def report(self) -> str:
        """Returns two tables, by stage and by number of workers, and what they mean.

        "up to here" is the rate of the graph if it ended after that stage.
        """
        tables = [self._stage_table(), self._run_table() if self.runs else []]
        return "\n\n".join("\n".join(table) for table in (*tables, wrapped(self.judgement())) if table)

    def judgement(self) -> str:
        """Returns what the figures mean, in a few sentences."""
        slowest = self.slowest
        text = f"{slowest.stage} takes {share_text(slowest.share)} of the time"
        if slowest.reading > _NOTED * slowest.seconds:
            text += f" ({share_text(slowest.reading / slowest.seconds)} of that in reading)"
        return " ".join(
            filter(None, (f"{text}{self._gains()}.", self._advice(), self._headroom_text(), self._others_text()))
        )

    def _gains(self) -> str:
        base, *others = self.runs or (None,)
        if base is None or not others:
            return ""
        gains = [f"{run.workers} {_give(run.workers)} {run.rate / base.rate:.2g} x" for run in others]
        gains[0] = gains[0].replace(" ", f" worker{'s' * (others[0].workers > 1)} ", 1)
        what = _workers(base.workers) if base.workers else "none"
        return f"; {', '.join(gains)} the rate of {what}, on {_count(self.processors, 'processor')}"

    def _advice(self) -> str:
        best = self.fastest
        if best is None or len(self.runs) < 2 or self._enough() is not None:
            return ""
        if best is self.runs[-1]:
            return "More workers may be faster still." if best.workers < self.processors else ""
        if not best.workers:
            return "Workers do not make it faster."
        return f"{_workers(best.workers)} {_are(best.workers)} enough."

    def _headroom_text(self) -> str:
        if self.headroom is None or self.fastest is None or self.step_rate is None:
            return ""
        run = self._enough()
        if run is None:
            text = f"With {_workers(self.fastest.workers)}, the loader makes {self.headroom:.2g} x what the step takes"
            return f"{text}: training waits for data." if self.headroom < 1 else f"{text}."
        text = f"{_workers(run.workers)} {_are(run.workers)} enough" if run.workers else "No workers are needed"
        return f"{text} for the step: the loader makes {run.rate / self.step_rate:.2g} x what it takes."

    def _enough(self) -> WorkersProfile | None:
        """Returns the run with the fewest workers that is clearly faster than the training step."""
        step_rate = self.step_rate
        return next((run for run in self.runs if run.rate >= _GAIN * step_rate), None) if step_rate else None

    def _others_text(self) -> str:
        busy = [run.others for run in self.runs if run.others is not None]
        others = sum(busy) / len(busy) if busy else 0.0
        if others < _DISTURBED * self.processors:
            return ""
        return f"Other programs kept {others:.1f} processors busy meanwhile: the rates are lower than they could be."

    def _stage_table(self) -> list[str]:
        has_reading = any(stage.reading > _NOTED * stage.seconds and stage.share > 0.01 for stage in self.stages)
        header = ["stage in one process", "per item", "share", *["reading"] * has_reading, "up to here"]
        rows = [
            [
                stage.stage + " (thread)" * stage.in_thread,
                seconds_text(stage.seconds_per_item) if stage.seconds_per_item else "-",
                share_text(stage.share),
                *[share_text(stage.reading / stage.seconds) if stage.seconds else "-"] * has_reading,
                "-" if stage.rate is None else f"{rate_text(stage.rate, 1)}/s",
            ]
            for stage in self.stages
        ]
        if self.outside >= 0.01:
            rows.append(["(the loader itself)", "", share_text(self.outside), *[""] * has_reading, ""])
        return table_lines(header, rows)

    def _run_table(self) -> list[str]:
        per_item = self.samples_per_item
        has_samples = per_item is not None and abs(per_item - 1) > 0.05
        columns = {
            "items/s": [rate_text(run.rate, 1) for run in self.runs],
            "samples/s": [rate_text(run.rate * (per_item or 0), 1) for run in self.runs] if has_samples else [],
            "first item": [seconds_text(run.first) for run in self.runs],
            "processors": [_known(run.processors, "{:.1f}".format) for run in self.runs],
            "memory": [_known(run.memory or run.main_memory, size_text) for run in self.runs],
            "largest worker": [_known(run.worker_memory, size_text) for run in self.runs],
        }
        shown = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
        rows = [[str(run.workers), *cells] for run, *cells in zip(self.runs, *shown.values(), strict=True)]
        return table_lines(["workers", *shown], rows)


def _give(count: int) -> str:
    return "gives" if count == 1 else "give"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _workers(count: int) -> str:
    return _count(count, "worker") if count else "no worker"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _known(value: Any, text: Any) -> str:
    return "-" if value is None else text(value)
