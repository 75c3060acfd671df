"""The figures of a data set as one web page with charts, without scripts or remote content."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torchdata_wds.cli.show.pages import PAGE_END, page_start, page_text
from torchdata_wds.cli.stats import charts
from torchdata_wds.cli.stats.dataset_figures import DatasetFigures, FieldFigures, ImageFigures, LabelFigures
from torchdata_wds.cli.stats.numbers import NumberFigures
from torchdata_wds.cli.stats.repeats import Group
from torchdata_wds.cli.stats.report_lines import duplicate_lines, places_text, range_text, share
from torchdata_wds.cli.terminal import counted
from torchdata_wds.workers.stats.reports.amounts import size_text

_MOST_ROWS, _MOST_CHARTS = 200, 12  # what is left out stands in --json
_STYLE = (
    """
:root { --accent: #2f74c8; --track: #eef1f5 }
@media (prefers-color-scheme: dark) { :root { --accent: #6aa6f0; --track: #24282e } }
body { margin: 1.5em auto; padding: 0 1.5em; max-width: 76em }
h2 { font-size: 1.05em; margin: 1.8em 0 .5em; border-bottom: 1px solid var(--line) }
h3 { font-size: .95em; margin: 0 0 .4em; overflow-wrap: anywhere }
p { margin: .2em 0 .6em; color: var(--faint); overflow-wrap: anywhere }
dl { display: flex; flex-wrap: wrap; gap: .6em 2.4em; margin: .5em 0 } dt { color: var(--faint); font-size: .85em }
dd { margin: 0; font-size: 1.5em; font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } .grid + .wide { margin-top: 1em }
.grid { display: grid; gap: 1.4em 2em }
.grid { grid-template-columns: repeat(auto-fill, minmax(min(20em, 100%), 1fr)) } .grid > div { min-width: 0 }
table { width: 100% } th { font-weight: 600; color: var(--faint); white-space: nowrap }
td { border-top: 1px solid var(--line); overflow-wrap: anywhere } td:last-child, th:last-child { padding-right: 0 }
.number { width: 1%; text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
td.name { min-width: 5em } td.bars { width: 40% } td.share { width: 20% }
td.bars, td.share, td.spark { vertical-align: middle }
"""
    + charts.STYLE
)


def write_page(figures: DatasetFigures, title: str) -> Iterator[str]:
    """Yields the page piece by piece, to be written as UTF-8."""
    yield page_start(title, _STYLE)
    yield _tiles(figures)
    if figures.fields:
        yield _section("Fields", _field_table(figures))
        yield _grid("Sizes in bytes", _size_charts(figures))
    yield from (_image_section(field, field.images) for field in _some(figures.fields, lambda field: field.images))
    labels = _some(figures.fields, lambda field: field.labels)
    yield _grid("Labels", (_labels(field, field.labels) for field in labels if field.labels))
    yield _section("Duplicates", "".join(_duplicates(figures)))
    yield _section("Oddities", _oddities(figures))
    yield _section("Shards", _shards(figures))
    yield PAGE_END


def _some(fields: Iterable[FieldFigures], chosen: Callable[[FieldFigures], object]) -> list[FieldFigures]:
    return [field for field in fields if chosen(field) is not None][:_MOST_CHARTS]


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{page_text(title)}</h2>\n{body}</section>\n" if body else ""


def _grid(title: str, pieces: Iterable[str]) -> str:
    body = "".join(f"<div>{piece}</div>\n" for piece in pieces)
    return _section(title, f'<div class="grid">\n{body}</div>\n' if body else "")


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str]) -> str:
    """Returns a table of cells that are HTML; `classes` has one word for each column, or an empty one."""
    names = [f' class="{name}"' if name else "" for name in classes]
    lines = [
        "<tr>" + "".join(f"<{tag}{name}>{cell}</{tag}>" for cell, name in zip(row, names, strict=True)) + "</tr>\n"
        for tag, group in (("th", [header] if header else []), ("td", rows))
        for row in group
    ]
    return f'<div class="wide"><table>\n{"".join(lines)}</table></div>\n'


def _more(left_out: int, noun: str, where: str = ": see --json") -> str:
    return f"<p>and {left_out:,} more {noun}{where}</p>\n" if left_out > 0 else ""


def _tiles(figures: DatasetFigures) -> str:
    repeated = figures.duplicates.samples.repeated
    tiles = {
        "samples": f"{figures.samples:,}",
        "shards": f"{len(figures.shards):,}",
        "content": size_text(figures.bytes),
        "fields": f"{len(figures.fields):,}",
        "repeated samples": f"{repeated:,}",
        "oddities": f"{len(figures.oddities):,}",
    }
    return "<dl>" + "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles.items()) + "</dl>\n"


def _field_table(figures: DatasetFigures) -> str:
    header = ("field", "samples", "", "", "min", "median", "95%", "max", "total", "sizes")
    classes = ("name", "number", "number", "share", *("number",) * 5, "spark")
    rows = []
    for field in figures.fields[:_MOST_ROWS]:
        sizes = field.sizes
        numbers = (sizes.minimum, sizes.median, sizes.p95, sizes.maximum, sizes.total)
        part = share(field.samples, figures.samples), charts.bar(field.samples, figures.samples)
        cells = map(size_text, numbers)
        rows.append((page_text(field.field), f"{field.samples:,}", *part, *cells, charts.spark(sizes.histogram)))
    table = _table(header, rows, classes) + _more(len(figures.fields) - _MOST_ROWS, "fields")
    others = counted(figures.other_fields, "member")
    return table + (f"<p>and {others} of other fields</p>\n" if figures.other_fields else "")


def _chart(numbers: NumberFigures, form: Callable[[int], str], noun: str, title: str) -> str:
    """Returns a heading, a range in words and, unless all numbers are the same, a histogram."""
    head = f"<h3>{page_text(title)}</h3>\n<p>{page_text(range_text(numbers, form))}</p>\n"
    if numbers.minimum == numbers.maximum:
        return head
    return head + charts.histogram_chart(numbers.histogram, form, noun, title)


def _size_charts(figures: DatasetFigures) -> Iterator[str]:
    """Yields the sizes of the fields that take most bytes, those of one size left out."""
    varied = [field for field in figures.fields if field.sizes.minimum < field.sizes.maximum]
    for field in sorted(varied, key=lambda field: -field.sizes.total)[:_MOST_CHARTS]:
        yield _chart(field.sizes, size_text, "sample", field.field)


def _image_section(field: FieldFigures, images: ImageFigures | None) -> str:
    if images is None:
        return ""
    pieces = [
        _chart(numbers, "{:,}".format, "image", name)
        for name, numbers in (("width in pixels", images.widths), ("height in pixels", images.heights))
        if numbers is not None
    ]
    if images.different_sizes > 1:
        bars = _bars(images.frequent_sizes, images.images) if images.frequent_sizes else ""
        pieces.append(f"<h3>{images.different_sizes:,} different sizes</h3>\n{bars}")
    if images.different_sizes == 1:
        width, height, _ = images.sizes[0]
        pieces = [f"<h3>all {width:,} x {height:,}</h3>\n"]
    kinds = [f"{count:,} {form} {mode}" for form, mode, count in images.kinds]
    failed = [f"{images.failed:,} whose header cannot be read"] if images.failed else []
    body = "".join(f"<div>{piece}</div>\n" for piece in pieces)
    words = page_text(", ".join([*kinds, *failed]))
    return _section(f"Images: {field.field}", f'<p>{words}</p>\n<div class="grid">\n{body}</div>\n')


def _labels(field: FieldFigures, labels: LabelFigures) -> str:
    head = f"<h3>{page_text(field.field)}</h3>\n<p>{counted(labels.different, 'different value')}</p>\n"
    rest = ""
    if labels.others:
        part = share(labels.other_samples, field.samples)
        each = f"each of {counted(labels.least, 'sample')} or more"
        rest = f"<p>{counted(labels.others, 'other')}: {labels.other_samples:,} ({part}), {each}</p>\n"
    return head + _bars(labels.top, field.samples) + rest


def _bars(rows: Sequence[tuple[str, int]], whole: int) -> str:
    most = max((count for _, count in rows), default=0)
    cells = [
        (page_text(name) or "(empty)", charts.bar(count, most), f"{count:,}", share(count, whole))
        for name, count in rows
    ]
    return _table((), cells, ("name", "bars", "number", "number"))


def _duplicates(figures: DatasetFigures) -> Iterator[str]:
    for text, repeats in duplicate_lines(figures):
        rows = [(f"{group.samples:,}", page_text(_group_text(group))) for group in repeats.examples]
        yield f"<p>{page_text(text)}</p>\n" + _table(("samples", "the first"), rows, ("number", ""))
        yield _more(repeats.groups - len(rows), "groups", "")


def _group_text(group: Group) -> str:
    more = group.samples - len(group.first)
    return places_text(group.first) + (f" and {more:,} more" if more else "")


def _oddities(figures: DatasetFigures) -> str:
    rows = [(page_text(odd.text), page_text(places_text(odd.examples))) for odd in figures.oddities[:_MOST_ROWS]]
    table = _table(("what", "for example"), rows, ("", "")) if rows else ""
    return table + _more(len(figures.oddities) - _MOST_ROWS, "oddities")


def _shards(figures: DatasetFigures) -> str:
    pieces = []
    if figures.shard_samples is not None and len(figures.shards) > 1:
        chart = _chart(figures.shard_samples, "{:,}".format, "shard", "samples per shard")
        pieces.append(f'<div class="grid"><div>{chart}</div></div>\n')
    most = max((shard.bytes for shard in figures.shards), default=0)
    rows = [
        (page_text(shard.shard), f"{shard.samples:,}", size_text(shard.bytes), charts.bar(shard.bytes, most))
        for shard in figures.shards[:_MOST_ROWS]
    ]
    table = _table(("shard", "samples", "content", ""), rows, ("", "number", "number", "bars")) if rows else ""
    return "".join(pieces) + table + _more(len(figures.shards) - _MOST_ROWS, "shards")
