"""What a benchmark prints and writes: Markdown tables, a JSON file, a bar chart."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Report", "Row", "Table", "note"]

Row = dict[
    str, Any
]  # "kind", "contender", figures, and "limit" if it is nothing that reads samples: as in the JSON file

PACKAGES = (
    "torch",
    "torchvision",
    "torchdata",
    "webdataset",
    "wids",
    "litdata",
    "datasets",
    "megatron-energon",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "pillow",
    "simplejpeg",
    "isal",
)


class Table(NamedTuple):
    """One table.

    Attributes:
        title: What stands above it, and how it was measured.
        columns: Heading and `str.format` template, filled from a row, of each column.
        rows: The rows; those of one "kind" stand together.
        bar: The figure that the chart draws.
        unit: Its name.
    """

    title: str
    columns: dict[str, str]
    rows: list[Row]
    bar: str
    unit: str


class Report:
    """All that one run of a benchmark found out.

    Args:
        name: The benchmark's.
        quick: Whether it ran on few samples, so that its figures mean nothing.
    """

    def __init__(self, name: str, *, quick: bool) -> None:
        self.name = name
        self.quick = quick
        self.machine = describe_machine()
        self.tables: list[Table] = []
        self.left_out: dict[str, str] = {}

    def leave_out(self, what: str, why: str) -> None:
        """Notes that something was not measured."""
        self.left_out[what] = why

    def print(self) -> None:
        """Prints it as Markdown."""
        print(", ".join(f"{name} {value}" for name, value in self.machine.items()))
        if self.quick:
            print("--quick: few samples, the figures mean nothing")
        for table in self.tables:
            print(f"\n{table.title}\n")
            print("\n".join(markdown(table)))
        for what, why in self.left_out.items():
            print(f"\nleft out: {what} ({why})")

    def write_json(self, path: Path) -> None:
        """Writes everything, also each round's seconds, as JSON."""
        tables = [{"title": table.title, "rows": table.rows} for table in self.tables]
        content = {
            "benchmark": self.name,
            "quick": self.quick,
            "machine": self.machine,
            "left_out": self.left_out,
            "tables": tables,
        }
        path.write_text(json.dumps(content, indent=1) + "\n")

    def write_chart(self, path: Path) -> None:
        """Draws a panel of bars for each kind, without limits, or says that matplotlib is missing."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            note("no chart: matplotlib is not installed (it is in the [bench] extra)")
            return
        panels = [
            (table, kind, [row for row in rows if not row.get("limit")])
            for table in self.tables
            for kind, rows in groupby(table.rows, lambda row: row["kind"])
        ]
        heights = [len(rows) + 2 for _, _, rows in panels]
        figure = Figure(figsize=(8, 0.32 * sum(heights)), layout="constrained")
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, (table, kind, rows) in zip(axes, panels, strict=True):
            _draw(axis, rows, table.bar)
            axis.set_title(f"{kind}: {table.unit}", loc="left", fontsize="medium")
        figure.savefig(path, dpi=120, format="png")


def _draw(axis: Any, rows: list[Row], figure: str) -> None:
    """Draws the bars of one kind."""
    values = [row[figure] for row in rows]
    colors = ["tab:orange" if row["contender"].startswith("ours") else "tab:gray" for row in rows]
    bars = axis.barh([row["contender"] for row in rows], values, color=colors)
    axis.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=3)
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)


def markdown(table: Table) -> list[str]:
    """The lines of a table, its columns aligned."""
    cells = [[template.format_map(row) for template in table.columns.values()] for row in table.rows]
    cells.insert(0, list(table.columns))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_text = [template in ("{kind}", "{contender}") for template in table.columns.values()]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row, widths, is_text, strict=True)
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = ["-" * width if text else "-" * (width - 1) + ":" for width, text in zip(widths, is_text, strict=True)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return lines


def describe_machine() -> dict[str, str]:
    """The versions and the machine that figures depend on."""
    found = {"Python": platform.python_version()}
    found |= {name: _version(name) for name in PACKAGES}
    found["CPUs"] = f"{os.cpu_count()} x {_cpu()}"
    found["platform"] = platform.platform(terse=True)
    return found


def _cpu() -> str:
    """The CPU's name on Linux; elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def note(line: str) -> None:
    """Says on stderr how far things are."""
    print(line, file=sys.stderr, flush=True)
