"""Draws how orders mix samples: the picture of the manual's page about the global order.

    python benchmarks/order_picture.py [--quick] [--out FILE]

One consumer reads 10,000 samples in 20 shards: shards in a random order with a buffer of 1,000 samples after them, and
in a global order with runs of 64, 16 and 1. The upper plots show all samples of an epoch, the lower ones the first 250.
The orders are those of the package, which reads real shards; the picture is the same on all machines.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT
from PIL import Image, ImageDraw, ImageFont
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import ShardWriter, WdsLoader

OUT = ROOT / "torchdata_wds" / "docs" / "order.png"
SHARDS = 20
BUFFERED = 2  # how many shards the buffer holds
RUNS = (64, 16, 1)
WINDOW = 250  # samples in the lower plots

WIDTH, HEIGHT, LOW = 236, 236, 150  # pixels of an upper plot, and the height of a lower one
LEFT, TOP, GAP, BETWEEN, BOTTOM = 66, 30, 16, 62, 44
INK, FAINT, DOT = (40, 40, 40), (228, 228, 228), (20, 80, 160)
FONT, TITLE = ImageFont.load_default(12), ImageFont.load_default(14)


class Plot(NamedTuple):
    """A box in which sample numbers are drawn over positions."""

    draw: ImageDraw.ImageDraw
    left: int
    top: int
    height: int
    positions: int
    samples: int

    def frame(self, numbered: bool) -> None:
        """Draws the box with a line where each shard begins, and with numbers at the left if it is the first."""
        for shard in range(1, SHARDS):
            y = self._y(shard * self.samples // SHARDS)
            self.draw.line((self.left, y, self.left + WIDTH, y), FAINT)
        self.draw.rectangle((self.left, self.top, self.left + WIDTH, self.top + self.height), outline=INK)
        bottom = self.top + self.height
        for value, anchor in ((0, "lt"), (self.positions // 2, "mt"), (self.positions, "rt")):
            x = self._x(value)
            self.draw.line((x, bottom, x, bottom + 4), INK)
            self.draw.text((x, bottom + 7), f"{value:,}", INK, FONT, anchor)
        for value in (0, self.samples // 2, self.samples) if numbered else ():
            self.draw.line((self.left - 4, self._y(value), self.left, self._y(value)), INK)
            self.draw.text((self.left - 7, self._y(value)), f"{value:,}", INK, FONT, "rm")

    def dots(self, numbers: Sequence[int], size: int) -> None:
        """Draws a dot for each position."""
        for position, number in enumerate(numbers[: self.positions]):
            x, y = self._x(position), self._y(number)
            self.draw.rectangle((x, y, x + size - 1, y + size - 1), DOT)

    def _x(self, position: int) -> int:
        return self.left + position * WIDTH // self.positions

    def _y(self, number: int) -> int:
        return self.top + self.height - number * self.height // self.samples


def orders(folder: Path, samples: int) -> Iterator[tuple[str, list[int]]]:
    """Writes the shards, and yields what each order is called, with the numbers of the samples in it."""
    with ShardWriter(folder / "train-%06d.tar", max_count=samples // SHARDS, index=True) as writer:
        for number in range(samples):
            writer.write({"__key__": f"{number:06d}", "cls": number})
    shards = [info.path for info in writer.shards]
    buffer = BUFFERED * samples // SHARDS
    streamed = IterableWrapper(shards).shuffle().load_wds_shards().group_by_key().wds_shuffle(buffer)
    yield f"shards, buffer of {buffer:,}", numbers_of(streamed)
    for run in RUNS:
        yield f"run={run}", numbers_of(IterableWrapper(shards).load_in_order(index=True, run=run))


def numbers_of(pipe: Any) -> list[int]:
    """Runs an epoch."""
    with WdsLoader(pipe, seed=1) as loader:
        return [int(sample["cls"]) for sample in loader]


def picture(drawn: Sequence[tuple[str, list[int]]], samples: int) -> Image.Image:
    """Draws the orders side by side."""
    size = (LEFT + len(drawn) * (WIDTH + GAP), TOP + HEIGHT + BETWEEN + LOW + BOTTOM)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)
    for place, (title, numbers) in enumerate(drawn):
        left = LEFT + place * (WIDTH + GAP)
        draw.text((left + WIDTH // 2, TOP - 8), title, INK, TITLE, "mb")
        for top, height, positions, dot in (
            (TOP, HEIGHT, samples, 1),
            (TOP + HEIGHT + BETWEEN, LOW, min(WINDOW, samples), 2),
        ):
            plot = Plot(draw, left, top, height, positions, samples)
            plot.frame(numbered=place == 0)
            plot.dots(numbers, dot)
            draw.text((left + WIDTH // 2, top + height + 24), "position in the epoch", INK, FONT, "mt")
    for top, height in ((TOP, HEIGHT), (TOP + HEIGHT + BETWEEN, LOW)):
        draw_upright(image, "sample number", top + height // 2)
    return image.quantize(16)


def draw_upright(image: Image.Image, text: str, middle: int) -> None:
    """Writes a label along the left edge."""
    label = Image.new("RGB", (160, 18), "white")
    ImageDraw.Draw(label).text((80, 9), text, INK, FONT, "mm")
    image.paste(label.rotate(90, expand=True).crop((0, 30, 18, 130)), (2, middle - 50))


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it runs")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="where it goes (default: the manual)")
    arguments = parser.parse_args()
    samples = 1_000 if arguments.quick else 10_000
    with tempfile.TemporaryDirectory() as folder:
        drawn = list(orders(Path(folder), samples))
    picture(drawn, samples).save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
