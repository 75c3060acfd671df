"""Draws a profile: the time of each stage, and the rate by the number of workers."""

from __future__ import annotations

import functools
import io
import math
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont

from torchdata_wds.cli.terminal import printable, shorten
from torchdata_wds.workers.profile.pipe_profile import PipeProfile, StageProfile, WorkersProfile
from torchdata_wds.workers.stats.reports.amounts import rate_text, seconds_text, share_text, size_text

_SCALE = 2  # pixels per unit, so that text is sharp on fine screens
_WIDTH, _MARGIN = 960, 32
_NAMES, _NOTES = 330, 190  # room for the names of stages, and for what stands after their bars
_ROW, _BAR = 28, 18
_PLOT = 220  # the height of the plot of rates
_LEFT = 64  # room for the numbers at its axis
_PAPER, _INK, _FAINT, _GRID = (255, 255, 255), (24, 24, 27), (113, 113, 122), (228, 228, 231)
_BLUE, _LIGHT, _RED = (37, 99, 175), (147, 190, 235), (200, 60, 40)
_LEAST = 0.005  # the share of a stage that is drawn
_TICKS = 5


def draw_chart(profile: PipeProfile, title: str) -> Iterator[bytes]:
    """Yields the bytes of a PNG."""
    stages = [stage for stage in profile.stages if stage.share >= _LEAST]
    judgement = textwrap.wrap(profile.judgement(), 145)
    heights = [
        60 + 18 * len(judgement),
        52 + _ROW * (len(stages) + (profile.outside >= _LEAST)),
        70 + _PLOT + 60 if profile.runs else 0,
    ]
    canvas = _Canvas(_WIDTH, sum(heights) + _MARGIN)
    canvas.text(_MARGIN, 24, shorten(printable(title), 90, middle=True), size=18)
    for row, line in enumerate(judgement):
        canvas.text(_MARGIN, 54 + 18 * row, line, color=_FAINT)
    _draw_stages(canvas, heights[0], profile, stages)
    if profile.runs:
        _draw_runs(canvas, heights[0] + heights[1], profile)
    out = io.BytesIO()
    canvas.image.save(out, "PNG", optimize=True)
    yield out.getvalue()


def _draw_stages(canvas: _Canvas, top: int, profile: PipeProfile, stages: list[StageProfile]) -> None:
    top += 16
    canvas.text(_MARGIN, top, "Share of the time in one process", size=14)
    has_reading = any(stage.reading >= _LEAST * stage.seconds for stage in stages)
    if has_reading:
        canvas.box(_WIDTH - _MARGIN - 96, top + 3, 12, 12, _LIGHT)
        canvas.text(_WIDTH - _MARGIN - 78, top, "of it reading", color=_FAINT)
    rows = [_Row(stage.stage, stage.share, _reading_of(stage), _time_of(stage)) for stage in stages]
    if profile.outside >= _LEAST:
        rows.append(_Row("the loader itself", profile.outside, 0.0, ""))
    left, room = _MARGIN + _NAMES + 12, _WIDTH - 2 * _MARGIN - _NAMES - 12 - _NOTES
    canvas.line(left, top + 30, left, top + 34 + _ROW * len(rows))
    for number, row in enumerate(rows):
        y = top + 34 + _ROW * number
        canvas.text(left - 12, y + 3, canvas.fit(printable(row.name), _NAMES), anchor="ra")
        # the axis begins at 0 and ends at 100 %
        canvas.box(left, y + 4, row.share * room, _BAR, _BLUE)
        canvas.box(left + (row.share - row.reading) * room, y + 4, row.reading * room, _BAR, _LIGHT)
        note = share_text(row.share) + (f"   {row.note}" if row.note else "")
        canvas.text(left + row.share * room + 8, y + 3, note, color=_FAINT)


def _draw_runs(canvas: _Canvas, top: int, profile: PipeProfile) -> None:
    per_item = profile.samples_per_item
    unit, factor = ("samples", per_item) if per_item else ("items", 1.0)
    what = f"{unit.capitalize()} per second by the number of workers, on {profile.processors} processors"
    canvas.text(_MARGIN, top + 16, what.replace(" 1 processors", " 1 processor"), size=14)
    limit = (profile.step_rate or 0.0) * factor
    step = _step_of(max(limit, *(run.rate * factor for run in profile.runs)))
    most = step * math.ceil(max(limit, *(run.rate * factor for run in profile.runs)) / step)
    left, right, bottom = _MARGIN + _LEFT, _WIDTH - _MARGIN, top + 70 + _PLOT
    for number in range(round(most / step) + 1):
        y = bottom - number * step / most * _PLOT
        canvas.line(left, y, right, y, _FAINT if not number else _GRID)
        canvas.text(left - 8, y - 8, f"{number * step:,.{0 if step >= 1 else 2}f}", color=_FAINT, anchor="ra")
    room = (right - left) / len(profile.runs)
    for number, run in enumerate(profile.runs):
        middle = left + (number + 0.5) * room
        height = run.rate * factor / most * _PLOT
        canvas.box(middle - min(48, room * 0.3), bottom - height, min(96, room * 0.6), height, _BLUE)
        rate = rate_text(run.rate * factor, 1)
        canvas.box(middle - 30, bottom - height - 18, 60, 16, _PAPER)  # hides the line of the grid
        canvas.text(middle, bottom - height - 19, rate, anchor="ma")
        for row, line in enumerate(_notes_of(run)):
            canvas.text(middle, bottom + 6 + 18 * row, line, color=_FAINT if row else _INK, anchor="ma")
    if limit:
        y = bottom - limit / most * _PLOT
        canvas.line(left, y, right, y, _RED, width=2)
        canvas.text(right, top + 18, f"training step: {rate_text(limit, 1)}", color=_RED, anchor="ra")


class _Row(NamedTuple):
    name: str
    share: float
    reading: float  # the part of the share
    note: str


def _reading_of(stage: StageProfile) -> float:
    return stage.share * stage.reading / stage.seconds if stage.seconds else 0.0


def _time_of(stage: StageProfile) -> str:
    return f"{seconds_text(stage.seconds_per_item)} per item" if stage.seconds_per_item else ""


def _notes_of(run: WorkersProfile) -> list[str]:
    memory = run.memory or run.main_memory
    name = f"{run.workers} worker{'s' * (run.workers != 1)}"
    return [name, *([size_text(memory)] if memory else []), f"first after {seconds_text(run.first)}"]


def _step_of(most: float) -> float:
    """Returns a round step that divides an axis up to `most` into about five."""
    # 4,350 needs steps of at least 870: the power of ten below is 100, and 10 x 100 = 1,000 is the first that suffices
    least = max(most, 1e-9) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


class _Canvas:
    """An image with coordinates in units of `_SCALE` pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.image = Image.new("RGB", (width * _SCALE, height * _SCALE), _PAPER)
        self._draw = ImageDraw.Draw(self.image)

    def text(self, x: float, y: float, text: str, *, size: int = 12, color: Any = _INK, anchor: str = "la") -> None:
        self._draw.text((x * _SCALE, y * _SCALE), text, fill=color, font=_font(size), anchor=anchor)

    def box(self, x: float, y: float, width: float, height: float, color: Any) -> None:
        if width * _SCALE >= 1 and height * _SCALE >= 1:
            ends = (x + width) * _SCALE - 1, (y + height) * _SCALE - 1
            self._draw.rectangle((x * _SCALE, y * _SCALE, *ends), fill=color)

    def line(self, x: float, y: float, to_x: float, to_y: float, color: Any = _FAINT, width: int = 1) -> None:
        ends = tuple(place * _SCALE for place in (x, y, to_x, to_y))
        self._draw.line(ends, fill=color, width=width * _SCALE)

    def fit(self, text: str, width: float) -> str:
        """Shortens a text in its middle to a width."""
        most = next((n for n in range(len(text), 0, -1) if self._length(shorten(text, n, middle=True)) <= width), 0)
        return shorten(text, most, middle=True)

    def _length(self, text: str) -> float:
        return _font(12).getlength(text) / _SCALE


@functools.cache
def _font(size: int) -> FreeTypeFont:
    return cast("FreeTypeFont", ImageFont.load_default(size * _SCALE))
