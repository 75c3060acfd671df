"""Samples as one page of HTML, which runs nothing and loads nothing from outside."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.show.summaries import FieldSummary

if TYPE_CHECKING:
    from PIL.Image import Image

# The page itself forbids whatever a mistake here might let through.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { margin: 1.5em; font: 14px/1.4 system-ui, sans-serif; color: #141414; background: #fff }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(24em, 1fr)); gap: 1em }
section { border: 1px solid #ddd; border-radius: 4px; padding: .7em; overflow: hidden }
h1 { font-size: 1.2em } h2 { font-size: 1em; margin: 0; overflow-wrap: anywhere }
p { margin: 0 0 .5em; color: #6e6e6e; overflow-wrap: anywhere }
figure { display: inline-block; margin: 0 .5em .5em 0; max-width: 100% }
figcaption { color: #6e6e6e; font-size: .85em }
img { max-width: 100%; background: repeating-conic-gradient(#d8d8d8 0 25%, #fff 0 50%) 0 0 / 16px 16px }
table { border-collapse: collapse; font-size: .9em } td, th { padding: .1em .8em .1em 0; vertical-align: top }
th { text-align: left } td.size { text-align: right; white-space: nowrap }
td.value { overflow-wrap: anywhere } .damaged { color: #960000 }
"""


class SampleSummary(NamedTuple):
    """One sample of a page, whose shard is as it may be shown; the pictures among its fields are drawn."""

    key: str
    shard: str
    fields: Sequence[FieldSummary]


def write_page(samples: Iterable[SampleSummary], title: str) -> Iterator[str]:
    """Yields a page piece by piece, to be written as UTF-8; memory holds one sample at a time."""
    yield (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n<main>\n"
    )
    for sample in samples:
        yield _section(sample)
    yield "</main>\n</body>\n</html>\n"


def _section(sample: SampleSummary) -> str:
    figures, rows = "", ""
    for field in sample.fields:
        name = _text(field.field)
        if field.picture is not None:
            width, height = field.picture.size
            alt = _text(f"{sample.key}.{field.field}")
            image = f'<img src="{data_uri(field.picture)}" width="{width}" height="{height}" alt="{alt}">'
            figures += f"<figure>{image}<figcaption>{name}</figcaption></figure>\n"
        kind = "value damaged" if field.is_damaged else "value"
        cells = f'<td class="size">{field.size:,} B</td><td class="{kind}">{_text(field.text)}</td>'
        rows += f"<tr><th>{name}</th>{cells}</tr>\n"
    head = f"<h2>{_text(sample.key)}</h2>\n<p>{_text(sample.shard)}</p>\n"
    return f"<section>\n{head}{figures}<table>\n{rows}</table>\n</section>\n"


def _text(text: str) -> str:
    """Escapes text for any place in the page, including attributes."""
    return escape(printable(text), quote=True)


def data_uri(image: Image) -> str:
    """Returns the image as a ``data:`` URL: PNG if it has an alpha channel, else JPEG."""
    out = io.BytesIO()
    image.info.clear()  # otherwise Pillow writes some of the file's own comments
    name = "png" if image.mode == "RGBA" else "jpeg"
    image.save(out, name, quality=85)
    return f"data:image/{name};base64,{base64.b64encode(out.getvalue()).decode()}"
