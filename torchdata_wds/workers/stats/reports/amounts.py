"""Writes sizes, times, shares and tables as people read them."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH = 100  # of tables and sentences, in columns

_SIZES = ("B", "KB", "MB", "GB", "TB", "PB")
_TIMES = ((7200.0, 3600.0, "h", 1), (120.0, 60.0, "min", 1), (9.95, 1.0, "s", 0), (0.9995, 1.0, "s", 1))
_SHORT_TIMES = ((9.95e-3, 1e-3, "ms", 0), (0.9995e-3, 1e-3, "ms", 1), (0.0, 1e-6, "us", 0))


def size_text(count: float) -> str:
    """Writes a number of bytes with a unit, in powers of 1,000.

    Example:
        >>> size_text(740), size_text(48_213), size_text(2_100_000_000)
        ('740 B', '48.2 KB', '2.1 GB')
    """
    number = 0
    while count >= 999.95 and number < len(_SIZES) - 1:  # 999.95 KB would be written 1,000.0 KB
        count, number = count / 1000, number + 1
    return f"{count:,.1f} {_SIZES[number]}" if number else f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """Writes a time with the unit in which it is easy to read.

    Example:
        >>> seconds_text(0.0123), seconds_text(3.21), seconds_text(61.2), seconds_text(5400)
        ('12 ms', '3.2 s', '61 s', '90.0 min')
    """
    if not seconds:
        return "0 s"
    size, unit, places = next(row[1:] for row in (*_TIMES, *_SHORT_TIMES) if seconds >= row[0])
    return f"{seconds / size:,.{places}f} {unit}"


def share_text(share: float) -> str:
    """Writes a share from 0 to 1 in percent.

    Example:
        >>> share_text(0.384), share_text(0.001)
        ('38%', '<1%')
    """
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def rate_text(count: float, seconds: float) -> str:
    """Writes a rate; "-" if there was no time.

    Example:
        >>> rate_text(50, 4), rate_text(51_000, 4)
        ('12.5', '12,750')
    """
    if seconds <= 0:
        return "-"
    rate = count / seconds
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def cut_text(text: str, width: int) -> str:
    """Cuts a text that is longer than `width` in its middle.

    Example:
        >>> cut_text("https://data.example.org/train-000017.tar", 24)
        'https://d...n-000017.tar'
    """
    if len(text) <= width:
        return text
    tail = (width - 3) * 3 // 5
    return f"{text[: width - 3 - tail]}...{text[len(text) - tail :]}"


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]], *, has_texts: bool = False) -> list[str]:
    """Lays out a table of names, numbers to the right and, if it `has_texts`, a last column of texts.

    Names and texts that do not fit into `WIDTH` are cut.
    """
    lines = [header, *rows]
    middle = range(1, len(header) - has_texts)
    widths = [max(len(line[column]) for line in lines) for column in middle]
    room = WIDTH - sum(widths) - 2 * len(widths)
    last = min(max(len(line[-1]) for line in lines), room // 2 - 2) if has_texts else 0
    first = min(max(len(line[0]) for line in lines), room - last - 2 * has_texts)
    if has_texts:  # what the names leave
        last = room - first - 2
    found = []
    for line in lines:
        cells = [cut_text(line[0], first).ljust(first)]
        cells += [line[column].rjust(width) for column, width in zip(middle, widths, strict=True)]
        cells += [cut_text(line[-1], last)] if has_texts else []
        found.append("  ".join(cells).rstrip())
    return found
