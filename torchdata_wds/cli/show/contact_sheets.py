"""Contact sheets: many thumbnails in one picture, with their keys and other fields below."""

import bisect
import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, cast

from PIL import Image, ImageDraw, ImageFont
from PIL.ImageFont import FreeTypeFont

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.terminal import printable, shorten
from torchdata_wds.codecs.images.pixels import fitting_size

_GAP = 8
_FONT_SIZE, _LINE = 13, 17
_NARROWEST = 112  # so that there is room for keys
_FIELD_LINES, _MOST_LINES = 3, 10  # of one field, and of all fields below an image
_LARGEST = 250_000_000  # pixels
_LONGEST = 65_500  # JPEG's limit
_PAPER, _FRAME, _INK, _FAINT = (255, 255, 255), (238, 238, 238), (20, 20, 20), (110, 110, 110)
_SQUARE, _LIGHT, _DARK = 8, (255, 255, 255), (216, 216, 216)  # of the checkerboard
_DAMAGED, _DAMAGED_INK = (250, 225, 225), (150, 0, 0)

# For letters that Pillow's own font lacks: the system's font that has most of them, the first of equals. Those after
# Arial have Chinese and Japanese.
_OTHER_FONTS = (
    "DejaVuSans.ttf",
    "NotoSans-Regular.ttf",
    "NotoSansCJK-Regular.ttc",
    "Arial Unicode.ttf",
    "arial.ttf",
    "wqy-zenhei.ttc",
    "DroidSansFallbackFull.ttf",
    "Hiragino Sans GB.ttc",
)
Line = tuple[str, FreeTypeFont]
InkedLine = tuple[str, FreeTypeFont, tuple[int, int, int]]


class Label(NamedTuple):
    """A field in words, below an image."""

    text: str
    is_damaged: bool = False


class Tile(NamedTuple):
    """One image of a sheet: a thumbnail, or the reason why the image does not decode, with lines below it."""

    key: str
    note: str  # below the key, such as the field
    picture: Image.Image | None
    failure: str = ""
    labels: Sequence[Label] = ()  # other fields; each is cut after three lines, all together after ten


def draw_sheet(tiles: Sequence[Tile], *, columns: int = 8, size: int = 160) -> Image.Image:
    """Draws an RGB contact sheet of images whose longest side is `size`, at most `columns` in a row."""
    columns = min(columns, len(tiles))
    labels = [_label_lines(tile.labels, max(size, _NARROWEST)) for tile in tiles]
    # All tiles have the height of the one with the most labels: the tenth of a sheet with 8 columns is then number 9,
    # in column 9 % 8 = 1 and row 9 // 8 = 1.
    lines = max(map(len, labels))
    width, height = _room(size, lines)
    sheet = Image.new("RGB", sheet_size(len(tiles), columns=columns, size=size, lines=lines), _PAPER)
    for number, (tile, label) in enumerate(zip(tiles, labels, strict=True)):
        drawn = Image.new("RGB", (width, height - _GAP), _PAPER)
        _draw_tile(drawn, tile, label, size)
        sheet.paste(drawn, (number % columns * width, number // columns * height + _GAP))
    return sheet


def sheet_size(count: int, *, columns: int = 8, size: int = 160, lines: int = 0) -> tuple[int, int]:
    """Returns width and height of a sheet of `count` images with `lines` lines of labels each."""
    columns = min(columns, count)
    width, height = _room(size, lines)
    area = columns * width + _GAP, -(-count // columns) * height + _GAP
    if area[0] * area[1] > _LARGEST or max(area) > _LONGEST:
        what = f"a sheet of {area[0]:,} x {area[1]:,} pixels is too large"
        raise UsageError(f"{what}: draw fewer or smaller images: see --count, --columns and --size")
    return area


def _room(size: int, lines: int) -> tuple[int, int]:
    """Returns width and height of a tile, with the gap to the next."""
    # below the image, key and note come first: without labels, 160 pixels need 168 x (160 + 2 * 17 + 2 * 8) = 168 x 210
    return max(size, _NARROWEST) + _GAP, size + (2 + lines) * _LINE + 2 * _GAP


def _draw_tile(sheet: Image.Image, tile: Tile, labels: Sequence[InkedLine], size: int) -> None:
    """Draws the image, or why there is none, with its key, note and labels below; a gap stays free on its left."""
    draw = ImageDraw.Draw(sheet)
    width, box = sheet.width - _GAP, (_GAP, 0, sheet.width - 1, size - 1)
    if tile.picture is None:
        draw.rectangle(box, fill=_DAMAGED)
        failure, font = _with_font(tile.failure)
        for row, line in enumerate(_wrap(failure, font, width - 8, (size - 8) // _LINE)):
            draw.text((_GAP + 4, 4 + row * _LINE), line, fill=_DAMAGED_INK, font=font)
    else:
        draw.rectangle(box, fill=_FRAME)
        picture = on_checkerboard(tile.picture)
        # for a tile of 160: 640 x 480 becomes 160 x 120, 32 x 32 becomes 160 x 160, and 100 x 100 stays
        if (factor := size // max(picture.size)) == 0:
            picture = picture.resize(fitting_size(picture.size, size), Image.Resampling.LANCZOS)
        elif factor > 1:
            picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
        sheet.paste(picture, (_GAP + (width - picture.width) // 2, (size - picture.height) // 2))
    key, note = (
        (fit_text(text, font, width), font, ink)
        for (text, font), ink in ((_with_font(tile.key), _INK), (_with_font(tile.note), _FAINT))
    )
    for row, (line, font, ink) in enumerate([key, note, *labels]):
        draw.text((_GAP, size + 2 + row * _LINE), line, fill=ink, font=font)


def on_checkerboard(image: Image.Image) -> Image.Image:
    """Returns an RGB image; a checkerboard shows where the original is transparent."""
    if image.mode == "RGB":
        return image
    board = Image.new("RGB", image.size, _LIGHT)
    for top in range(0, image.height, _SQUARE):
        for left in range(top % (2 * _SQUARE), image.width, 2 * _SQUARE):
            board.paste(_DARK, (left, top, left + _SQUARE, top + _SQUARE))
    board.paste(image, mask=image.getchannel("A"))
    return board


def _label_lines(labels: Sequence[Label], width: int) -> list[InkedLine]:
    """Breaks labels into lines, each with the font that has its letters, and the ink."""
    lines: list[InkedLine] = []
    for label in labels:
        shown, font = _with_font(label.text)
        ink = _DAMAGED_INK if label.is_damaged else _INK
        lines += [(line, font, ink) for line in _wrap(shown, font, width, _FIELD_LINES)]
    return lines if len(lines) <= _MOST_LINES else [*lines[: _MOST_LINES - 1], ("...", _font(None), _INK)]


def _wrap(text: str, font: FreeTypeFont, width: int, most: int) -> list[str]:
    """Breaks a text into lines, at blanks where there are any; what does not fit into the last is cut."""
    lines: list[str] = []
    rest = text.strip()
    while rest and len(lines) < most:
        # at least one character a line, so that a letter wider than the tile does not loop forever
        fits = max(1, _most(len(rest), lambda count: font.getlength(rest[:count]) <= width))  # noqa: B023
        if fits < len(rest) and len(lines) == most - 1:
            lines.append(shorten(rest, _most(len(rest), lambda count: font.getlength(shorten(rest, count)) <= width)))  # noqa: B023
            break
        if fits < len(rest) and (blank := rest.rfind(" ", 1, fits + 1)) > 0:
            fits = blank
        lines.append(rest[:fits].rstrip())
        rest = rest[fits:].lstrip()
    return lines


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number up to a count that fits, or 0; if one fits, so must all smaller ones."""
    # if 3 of the numbers 1 to 5 fit, the key yields False, False, False, True, True: the first True is at place 3
    return bisect.bisect_left(range(1, count + 1), True, key=lambda number: not fits(number))


def fit_text(text: str, font: FreeTypeFont, width: int) -> str:
    """Shortens a text in its middle to a width in pixels."""
    most = _most(len(text), lambda count: font.getlength(shorten(text, count, middle=True)) <= width)
    return shorten(text, most, middle=True)


def _with_font(text: str) -> Line:
    """Returns a text made printable, and the font that has most of its letters; those it lacks are escaped."""
    text = printable(text)
    best, missing = None, _missing(None, text)
    for name in _OTHER_FONTS if missing else ():
        with suppress(OSError):
            if len(lacking := _missing(name, text)) < len(missing):
                best, missing = name, lacking
    codes = {ord(letter): letter.encode("unicode_escape").decode() for letter in missing}
    return text.translate(codes), _font(best)


def _missing(name: str | None, text: str) -> set[str]:
    return {letter for letter in set(text) if not _has_glyph(name, letter)}


@functools.cache
def _font(name: str | None) -> FreeTypeFont:
    font = ImageFont.load_default(_FONT_SIZE) if name is None else ImageFont.truetype(name, _FONT_SIZE)
    return cast("FreeTypeFont", font)


@functools.lru_cache(maxsize=4096)
def _has_glyph(name: str | None, letter: str) -> bool:
    # U+FFFF is never a character: a letter that looks like it is missing from the font
    font = _font(name)
    return letter == " " or bytes(font.getmask(letter)) != bytes(font.getmask("\uffff"))
