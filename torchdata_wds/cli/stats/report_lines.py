"""The figures of a data set as text."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from torchdata_wds.cli.stats.dataset_figures import DatasetFigures, FieldFigures, ImageFigures, LabelFigures
from torchdata_wds.cli.stats.numbers import NumberFigures
from torchdata_wds.cli.stats.repeats import Repeats
from torchdata_wds.cli.stats.tallies import Place
from torchdata_wds.cli.terminal import counted, printable, shorten
from torchdata_wds.workers.stats.reports.amounts import size_text, table_lines

_MOST_LINES = 50  # fields and oddities; --json has all
_BAR, _WIDEST = 30, 40


def report(figures: DatasetFigures) -> Iterator[str]:
    """Yields the lines of the report."""
    yield headline(figures)
    if figures.shard_samples is not None and len(figures.shards) > 1:
        yield f"samples per shard: {range_text(figures.shard_samples, '{:,}'.format)}"
    if figures.fields:
        yield from ("", *_table(figures))
    for field in figures.fields[:_MOST_LINES]:
        if field.images is not None:
            yield from ("", *_image_lines(field, field.images))
        if field.labels is not None:
            yield from ("", *_label_lines(field, field.labels))
    yield from _repeat_lines(figures)
    yield from _oddity_lines(figures)


def headline(figures: DatasetFigures) -> str:
    """Returns the counts of the whole data set."""
    samples, shards = counted(figures.samples, "sample"), counted(len(figures.shards), "shard")
    return f"{samples} in {shards}, {size_text(figures.bytes)} in their fields"


def share(part: int, whole: int) -> str:
    """Writes a part in percent, rounded so that only all is 100% and only nothing 0%."""
    if part in (0, whole):
        return "100%" if part else "0%"
    percent = 100 * part / whole
    return "<0.1%" if percent < 0.1 else f"{min(percent, 99.9):.1f}%"


def duplicate_lines(figures: DatasetFigures) -> Iterator[tuple[str, Repeats]]:
    """Yields what is to be said about each kind of duplicates, with the groups."""
    same, largest = figures.duplicates
    if same.repeated:
        what = counted(same.repeated, "sample repeats", "samples repeat")
        yield f"{what} all content of an earlier one: {counted(same.groups, 'group')}", same
    if largest.samples:
        what = f"{largest.samples:,} samples have the same largest field as others, but differ in the rest"
        yield f"{what}: {counted(largest.groups, 'group')}", largest


def range_text(numbers: NumberFigures, form: Callable[[int], str]) -> str:
    """Writes the smallest, largest and middle of numbers."""
    if numbers.minimum == numbers.maximum:
        return form(numbers.minimum)
    ends = f"{form(numbers.minimum)} to {form(numbers.maximum)}"
    return f"{ends}, median {form(numbers.median)}, 95% at most {form(numbers.p95)}"


def places_text(places: Iterable[Place]) -> str:
    """Writes samples as key and shard."""
    return ", ".join(printable(f"{place.key} ({place.shard})" if place.key else place.shard) for place in places)


def _table(figures: DatasetFigures) -> Iterator[str]:
    header = ("field", "samples", "share", "min", "median", "95%", "max", "total")
    rows = []
    for field in figures.fields[:_MOST_LINES]:
        sizes = field.sizes
        numbers = (sizes.minimum, sizes.median, sizes.p95, sizes.maximum, sizes.total)
        part = share(field.samples, figures.samples)
        rows.append((printable(field.field), f"{field.samples:,}", part, *map(size_text, numbers)))
    yield from table_lines(header, rows)
    if (more := len(figures.fields) - _MOST_LINES) > 0:
        yield f"and {counted(more, 'more field')} (--json has them)"
    if figures.other_fields:
        yield f"and {counted(figures.other_fields, 'member')} of other fields, which were not counted singly"


def _image_lines(field: FieldFigures, images: ImageFigures) -> Iterator[str]:
    kinds = ", ".join(f"{count:,} {form} {mode}" for form, mode, count in images.kinds)
    yield f"images in {printable(field.field)}: {kinds or 'none that can be read'}"
    for name, numbers in (("width", images.widths), ("height", images.heights)):
        if numbers is not None:
            yield f"  {name}: {range_text(numbers, '{:,}'.format)}"
    if images.different_sizes > 1:
        frequent = images.frequent_sizes
        yield f"  {images.different_sizes:,} different sizes{', most often:' if frequent else ''}"
        yield from _bars([(f"  {size}", count) for size, count in frequent], images.images)


def _label_lines(field: FieldFigures, labels: LabelFigures) -> Iterator[str]:
    yield f"values of {printable(field.field)}: {labels.different:,} different"
    rows = [(f"  {shorten(printable(label), _WIDEST) or '(empty)'}", count) for label, count in labels.top]
    yield from _bars(rows, field.samples)
    if labels.others:
        others = counted(labels.others, "other")
        part = share(labels.other_samples, field.samples)
        yield f"  {others}: {labels.other_samples:,} ({part}), each {labels.least:,} or more"


def _bars(rows: Sequence[tuple[str, int]], whole: int) -> Iterator[str]:
    most = max((count for _, count in rows), default=1)
    cells = [
        (name, f"{count:,}", share(count, whole), "#" * max(1, round(_BAR * count / most))) for name, count in rows
    ]
    if cells:
        yield from table_lines(cells[0], cells[1:], has_texts=True)


def _repeat_lines(figures: DatasetFigures) -> Iterator[str]:
    for text, repeats in duplicate_lines(figures):
        yield from ("", text)
        for group in repeats.examples:
            more = f" and {group.samples - len(group.first):,} more" if group.samples > len(group.first) else ""
            yield f"  {places_text(group.first)}{more}"


def _oddity_lines(figures: DatasetFigures) -> Iterator[str]:
    if figures.oddities:
        yield from ("", "odd:")
    for oddity in figures.oddities[:_MOST_LINES]:
        examples = f": {places_text(oddity.examples)}" if oddity.examples else ""
        yield f"  {printable(oddity.text)}{examples}"
    if (more := len(figures.oddities) - _MOST_LINES) > 0:
        yield f"  and {more:,} more (--json has them)"
