"""Charts as inline SVG, without scripts; their colours are those of the page's style sheet."""

from collections.abc import Callable, Iterator, Sequence

from torchdata_wds.cli.show.pages import page_text
from torchdata_wds.cli.stats.numbers import Histogram

_WIDTH, _HEIGHT, _TOP, _FOOT = 320, 132, 18, 18
_LEAST = 1.5  # the height of a bar that is not empty
_WIDEST = 48  # a bar
_LETTER = 6.2  # the width of one, about

STYLE = """
svg.chart { display: block; width: 100%; max-width: 26em; height: auto }
svg.chart text { fill: var(--faint); font-size: 11px }
svg.chart line { stroke: var(--line) } svg.chart rect, svg.bar rect, svg.spark rect { fill: var(--accent) }
svg.chart rect.hit { fill: transparent } svg.chart g:hover rect.hit { fill: var(--line); fill-opacity: .5 }
svg.bar { display: block; width: 100%; min-width: 4em; height: .8em; background: var(--track); border-radius: 2px }
svg.spark { display: block; width: 6em; height: 1.4em }
"""


def histogram_chart(histogram: Histogram, form: Callable[[int], str], noun: str, title: str) -> str:
    """Draws a histogram; `form` writes a number of its axis, and `noun` is what it counts."""
    counts, edges = histogram.counts, histogram.edges
    most = max(counts)
    floor, room = _HEIGHT - _FOOT, _HEIGHT - _FOOT - _TOP
    step = min(_WIDTH / len(counts), _WIDEST)
    bars = []
    for number, count in enumerate(counts):
        height = max(_LEAST, room * count / most) if count else 0.0
        low, high = edges[number], edges[number + 1] - 1
        span = form(low) if form(low) == form(high) else f"{form(low)} to {form(high)}"
        label = page_text(f"{span}: {count:,} {noun if count == 1 else noun + 's'}")
        left = number * step
        # the first rectangle is for the pointer, which would miss a low bar
        bars.append(
            f'<g><title>{label}</title><rect class="hit" x="{left:.2f}" y="{_TOP}" width="{step:.2f}" height="{room}"/>'
            f'<rect x="{left + 0.5:.2f}" y="{floor - height:.2f}" width="{step - 1:.2f}" height="{height:.2f}"/></g>'
        )
    ticks = "".join(_ticks(edges, step, form))
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{page_text(title)}">'
        f'<text x="0" y="{_TOP - 6}">{most:,}</text><line x1="0" y1="{_TOP - 0.5}" x2="{_WIDTH}" y2="{_TOP - 0.5}"/>'
        f'{"".join(bars)}<line x1="0" y1="{floor + 0.5}" x2="{_WIDTH}" y2="{floor + 0.5}"/>{ticks}</svg>'
    )


def _ticks(edges: Sequence[int], step: float, form: Callable[[int], str]) -> Iterator[str]:
    """Yields labels below bars, as many different ones as have room; the first starts at the left border."""
    end, last = 0.0, ""
    for number, edge in enumerate(edges[:-1]):
        label = form(edge)
        width = _LETTER * len(label)
        left = 0.0 if number == 0 else number * step - width / 2
        if number and (left < end or left + width > _WIDTH or label == last):
            continue
        anchor, place = ("start", 0.0) if number == 0 else ("middle", number * step)
        yield f'<text x="{place:.1f}" y="{_HEIGHT - 4}" text-anchor="{anchor}">{page_text(label)}</text>'
        end, last = left + width + 4 * _LETTER, label


def spark(histogram: Histogram) -> str:
    """Draws a histogram in the height of a line, without words."""
    most, count = max(histogram.counts), len(histogram.counts)
    bars = "".join(
        f'<rect x="{number}" y="{20 - height:.1f}" width=".85" height="{height:.1f}"/>'
        for number, value in enumerate(histogram.counts)
        if (height := max(1.0, 20 * value / most) if value else 0.0)
    )
    return f'<svg class="spark" viewBox="0 0 {count} 20" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>'


def bar(part: int, whole: int) -> str:
    """Draws a part of a whole as a horizontal bar."""
    width = 100 * part / whole if whole else 0.0
    return (
        '<svg class="bar" viewBox="0 0 100 1" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.2f}" height="1"/></svg>'
    )
