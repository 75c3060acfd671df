"""Show samples as text, or their images as a contact sheet or a web page.

wds show -c 2 train-000000.tar
wds show -f "jpg cls" --out sheet.png 'train-{000000..000003}.tar'
wds show -c 20 --out page.html train-*.tar
"""

import argparse
import base64
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import islice
from typing import NamedTuple

from PIL.Image import Image

from torchdata_wds.cli import outputs
from torchdata_wds.cli.command import Command, UsageError, add_count, add_force, option, positive_number, whole_number
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments
from torchdata_wds.cli.show.contact_sheets import Label, Tile, draw_sheet, sheet_size
from torchdata_wds.cli.show.pages import PAGE_END, page_start, page_text
from torchdata_wds.cli.show.summaries import FieldSummary, Summarizer
from torchdata_wds.cli.terminal import counted, printable, say
from torchdata_wds.errors import SampleError, WdsError
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN

_SHEETS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
_PAGES = (".html", ".htm")
_TEXTS, _PICTURES = 10, 100  # how many samples by default
_WIDTH, _SIZE = 80, 160
_MOST_THREADS = 8
_REASON = 400  # characters of a reason that a tile may have room for

_STYLE = """
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(24em, 100%), 1fr)); gap: 1em }
section { border: 1px solid var(--line); border-radius: 4px; padding: .7em; overflow: hidden }
h2 { font-size: 1em; margin: 0; overflow-wrap: anywhere }
p { margin: 0 0 .5em; color: var(--faint); overflow-wrap: anywhere }
figure { display: inline-block; margin: 0 .5em .5em 0; max-width: 100% }
figcaption { color: var(--faint); font-size: .85em }
img { max-width: 100%; background: repeating-conic-gradient(#d8d8d8 0 25%, #fff 0 50%) 0 0 / 16px 16px }
td.size { text-align: right; white-space: nowrap } td.value { overflow-wrap: anywhere }
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser, parts=False)
    outputs.add_field_arguments(parser)
    add_count(parser, f"{_TEXTS}, or {_PICTURES} with --out")
    text = f"at most N characters of each value (default: {_WIDTH})"
    option(parser, "-w --width", "N", text, positive_number, default=_WIDTH)
    group = parser.add_argument_group("pictures")
    text = "x.png or x.jpg: a contact sheet of the images, with the other fields of --fields below them; x.html: "
    option(group, "-o --out", "FILE", text + "a page of everything", outputs.one_output, dest="output", default=STDIN)
    option(group, "--columns", "N", "columns of the sheet (default: 8)", positive_number, default=8)
    text = f"longest side of an image in pixels (default: {_SIZE}); 0, for a page, keeps their own sizes"
    option(group, "--size", "N", text, whole_number, default=_SIZE)
    add_force(group)


def _run(arguments: argparse.Namespace) -> int:
    kind = _kind(arguments)
    showing = Showing(arguments, kind)
    if kind == "":
        _print(showing.samples())
        return showing.finish()
    if kind in _PAGES:
        title = ", ".join(map(mask_url, arguments.shards)) or "standard input"
        pieces: Iterator[bytes] = (piece.encode() for piece in write_page(showing.samples(), title))
    else:
        pieces = _sheet(showing, arguments, _SHEETS[kind])
    outputs.write_whole(pieces, arguments.output, overwrite=arguments.force)
    return showing.finish()


def _kind(arguments: argparse.Namespace) -> str:
    """Returns the suffix, which decides what is drawn; "" for text."""
    if arguments.output == STDIN:
        return ""
    shown = mask_url(arguments.output)
    kinds = (*_SHEETS, *_PAGES)
    kind = next((suffix for suffix in kinds if shown.partition("?")[0].lower().endswith(suffix)), "")
    if not kind:
        raise UsageError(f"--out takes a name that ends in {', '.join(kinds)}, not {shown!r}")
    if arguments.size == 0 and kind in _SHEETS:
        raise UsageError("a contact sheet needs images of one size: --size 0 is for pages")
    return kind


class SampleSummary(NamedTuple):
    """One sample: its key, its shard with secrets masked, and its fields."""

    key: str
    shard: str
    fields: Sequence[FieldSummary]


class Showing:
    """Reads samples and summarizes them, and counts what does not decode."""

    def __init__(self, arguments: argparse.Namespace, kind: str) -> None:
        self._choices = outputs.field_choices(arguments)
        self._reader = SampleReader(arguments)
        self._arguments, self._kind = arguments, kind
        self._default = _PICTURES if kind else _TEXTS
        self._is_more, self._damaged = False, 0

    def samples(self) -> Iterator[SampleSummary]:
        """Yields the samples, each with its fields summarized."""
        arguments, kind = self._arguments, self._kind
        width = max(arguments.width, _REASON) if kind in _SHEETS else arguments.width
        summarize = Summarizer(width=width, max_size=arguments.size if kind else None)
        threads = min(_MOST_THREADS, os.cpu_count() or 1) if kind else 0  # text is quick; thumbnails take time
        count: int | None = arguments.count
        choose, is_over = self._choices.choose, False
        with (
            closing(self._reader.taken(lambda sample: sample if is_over else choose(sample), count)) as samples,
            closing(summarize.each(islice(samples, self._default if count is None else count), threads)) as summarized,
        ):
            for sample, fields in summarized:
                self._damaged += sum(field.is_damaged for field in fields)
                yield SampleSummary(sample["__key__"], mask_url(sample["__url__"]), fields)
            # Try to read one more sample, with whichever fields, to say that more follow; not if the user chose the
            # count, nor with --errors skip, which would report damage after the end.
            is_over = True
            if count is None and arguments.errors == "stop":
                with suppress(WdsError, OSError):  # damage after the end does not matter here
                    self._is_more = next(samples, None) is not None

    def finish(self) -> int:
        """Says what was left out and what does not decode, and returns the exit status."""
        if self._is_more:
            say(f"these are the first {counted(self._default, 'sample')}, and more follow: see --count")
        self._choices.tell()
        if self._damaged:
            say(f"{counted(self._damaged, 'field does', 'fields do')} not decode (see there)")
        return max(self._reader.finish(), 1 if self._damaged else 0)


def _print(samples: Iterable[SampleSummary]) -> None:
    for number, sample in enumerate(samples):
        outputs.write_line(("\n" if number else "") + f"{printable(sample.key)}  {printable(sample.shard)}")
        names = [printable(field.field) for field in sample.fields]
        widest = max(map(len, names), default=0)
        digits = max((len(f"{field.size:,}") for field in sample.fields), default=0)
        for name, field in zip(names, sample.fields, strict=True):
            outputs.write_line(f"  {name:<{widest}}  {field.size:>{digits},} B  {field.text}".rstrip())


def _sheet(showing: Showing, arguments: argparse.Namespace, form: str) -> Iterator[bytes]:
    columns, size = arguments.columns, arguments.size
    tiles: list[Tile] = []
    count = 0
    for count, sample in enumerate(showing.samples(), 1):  # noqa: B007 - for the message below
        # without --fields, only images are drawn: the other fields may be anything
        others = [] if arguments.fields is None else [field for field in sample.fields if not field.is_image]
        labels = [Label(f"{field.field}: {field.text}", field.is_damaged) for field in others]
        for field in sample.fields:
            if field.is_image:  # of "JPEG image, RGB, 640 x 480, EXIF orientation 6", the note has mode and size
                note = "" if field.picture is None else f"  {field.text.partition(', ')[2].partition(', EXIF')[0]}"
                tiles.append(Tile(sample.key, field.field + note, field.picture, field.text, labels))
        sheet_size(max(1, len(tiles)), columns=columns, size=size)  # too many images are refused before all are read
    if not tiles:
        raise SampleError(f"no image in {counted(count, 'sample')}: nothing to draw")
    out = io.BytesIO()
    draw_sheet(tiles, columns=columns, size=size).save(out, form, quality=90, compress_level=2)
    yield out.getvalue()


def write_page(samples: Iterable[SampleSummary], title: str) -> Iterator[str]:
    """Yields a page piece by piece, to be written as UTF-8; memory holds one sample at a time."""
    yield page_start(title, _STYLE) + "<main>\n"
    yield from map(_section, samples)
    yield "</main>\n" + PAGE_END


def _section(sample: SampleSummary) -> str:
    figures, rows = "", ""
    for field in sample.fields:
        name = page_text(field.field)
        if field.picture is not None:
            width, height = field.picture.size
            alt = page_text(f"{sample.key}.{field.field}")
            image = f'<img src="{data_uri(field.picture)}" width="{width}" height="{height}" alt="{alt}">'
            figures += f"<figure>{image}<figcaption>{name}</figcaption></figure>\n"
        kind = "value damaged" if field.is_damaged else "value"
        cells = f'<td class="size">{field.size:,} B</td><td class="{kind}">{page_text(field.text)}</td>'
        rows += f"<tr><th>{name}</th>{cells}</tr>\n"
    head = f"<h2>{page_text(sample.key)}</h2>\n<p>{page_text(sample.shard)}</p>\n"
    return f"<section>\n{head}{figures}<table>\n{rows}</table>\n</section>\n"


def data_uri(image: Image) -> str:
    """Returns the image as a ``data:`` URL: PNG if it has an alpha channel, else JPEG."""
    out = io.BytesIO()
    image.info.clear()  # otherwise Pillow writes some of the file's own comments
    name = "png" if image.mode == "RGBA" else "jpeg"
    image.save(out, name, quality=85)
    return f"data:image/{name};base64,{base64.b64encode(out.getvalue()).decode()}"


COMMAND = Command(__doc__, _add_arguments, _run)
