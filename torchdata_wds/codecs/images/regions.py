"""Regions of images: which part is wanted, and to how many pixels it is resampled."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from torchdata_wds.codecs.images.jpeg import STEPS
from torchdata_wds.codecs.images.pixels import TURNS

_TRIES = 10  # as torchvision's RandomResizedCrop


class Span(NamedTuple):
    """A region along one axis of an image."""

    side: int  # pixels of the image
    start: int  # the first pixel that is resampled
    length: int
    made: int  # to how many pixels
    first: int  # the first of those that is kept
    kept: int

    def mirrored(self) -> Span:
        """Returns the same span, counted from the other end."""
        start, first = self.side - self.start - self.length, self.made - self.first - self.kept
        return self._replace(start=start, first=first)

    def at(self, step: int) -> Span:
        """Rounds the span to multiples of a step, within the image; a span over the whole side stays as it is."""
        # 1,001 pixels at step 2 are 501, of which the last one stands for one pixel only. 600 from pixel 401 on become
        # the 300 from pixel 200 on, which show 600 from pixel 400 on.
        if step == 1 or self.length == self.side:
            return self
        whole = self.side // step
        length = min(round(self.length / step), whole)
        start = min(round(self.start / step), whole - length)
        return self._replace(start=start * step, length=length * step)


class Region(NamedTuple):
    """A region of an image as it is stored, and the largest step at which it still has all pixels that are made."""

    # Its borders are multiples of the step, or those of the image, also where nothing is decoded at a step: the same
    # draws give the same crop of any format.
    rows: Span
    columns: Span
    step: int


def region_of(rows: Span, columns: Span, orientation: int) -> Region:
    """Makes the region of an image that is stored with an EXIF orientation from that of the upright one."""
    if orientation != 1:
        swapped, down, right = TURNS[orientation]
        rows, columns = rows if down > 0 else rows.mirrored(), columns if right > 0 else columns.mirrored()
        rows, columns = (columns, rows) if swapped else (rows, columns)
    covers = min(rows.length // rows.made, columns.length // columns.made)
    step = next(step for step in STEPS if step <= max(1, covers))
    return Region(rows.at(step), columns.at(step), step)


def draw_crop(
    side: tuple[int, int],
    size: tuple[int, int],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: random.Random,
) -> tuple[Span, Span]:
    """Draws a crop, as torchvision's RandomResizedCrop does; sides and sizes are (height, width)."""
    height, width = side
    lowest, highest = (math.log(limit) for limit in ratio)
    for _ in range(_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * generator.random())
        aspect = math.exp(lowest + (highest - lowest) * generator.random())
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(generator.random() * (height - tall + 1))
            left = int(generator.random() * (width - wide + 1))
            break
    else:  # the largest one in the middle
        tall = height if width / height >= ratio[0] else max(1, min(height, round(width / ratio[0])))
        wide = width if width / height <= ratio[1] else max(1, min(width, round(height * ratio[1])))
        top, left = (height - tall) // 2, (width - wide) // 2
    rows = Span(height, top, tall, size[0], 0, size[0])
    return rows, Span(width, left, wide, size[1], 0, size[1])


def centre_crop(side: tuple[int, int], size: tuple[int, int], resize: int) -> tuple[Span, Span]:
    """Returns the middle of an image whose shorter side is resized first, as torchvision's Resize and CenterCrop do."""
    shorter = min(side)
    spans = []
    for length, kept in zip(side, size, strict=True):
        made = resize if length == shorter else int(resize * length / shorter)
        spans.append(Span(length, 0, length, made, round((made - kept) / 2), kept))
    return spans[0], spans[1]
