"""Contact sheets."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.show import contact_sheets
from torchdata_wds.cli.show.contact_sheets import Label, Tile, draw_sheet, fit_text

RED = (255, 0, 0)


def tile(key: str = "key", size: tuple[int, int] = (64, 48), colour: tuple[int, int, int] = RED) -> Tile:
    return Tile(key, "jpg", Image.new("RGB", size, colour))


def count_of(sheet: Image.Image, colour: tuple[int, int, int]) -> int:
    """How many pixels have a colour."""
    return int((np.asarray(sheet) == colour).all(axis=2).sum())


@pytest.mark.parametrize(("number", "columns", "rows"), [(1, 8, 1), (8, 8, 1), (9, 8, 2), (5, 2, 3)])
def test_sheet_has_a_place_for_each_tile_when_drawn(number: int, columns: int, rows: int) -> None:
    """Every image is there, whole."""
    sheet = draw_sheet([tile() for _ in range(number)], columns=columns, size=64)
    one = draw_sheet([tile()], size=64)
    assert sheet.mode == "RGB"
    assert sheet.width == (one.width - 8) * min(columns, number) + 8
    assert sheet.height == (one.height - 8) * rows + 8
    assert count_of(sheet, RED) == number * 64 * 48


def test_tiles_go_left_to_right_and_down_when_drawn() -> None:
    """In the samples' order."""
    shades = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    sheet = np.asarray(draw_sheet([tile(colour=shade) for shade in shades], columns=2, size=64))
    centres = [np.argwhere((sheet == shade).all(axis=2)).mean(axis=0) for shade in shades]
    assert centres[0][0] == centres[1][0] < centres[2][0]
    assert centres[0][1] == centres[2][1] < centres[1][1]


def test_pictures_fill_their_tiles_when_much_smaller_or_larger() -> None:
    """Small ones by whole pixels, large ones reduced."""
    assert count_of(draw_sheet([tile(size=(10, 5))], size=64), RED) == 60 * 30
    assert count_of(draw_sheet([tile(size=(640, 320))], size=64), RED) == 64 * 32
    assert count_of(draw_sheet([tile(size=(40, 20))], size=64), RED) == 40 * 20


def test_transparency_is_seen_when_a_picture_has_it() -> None:
    """On a checkerboard."""
    sheet = draw_sheet([Tile("", "", Image.new("RGBA", (64, 64)))], size=64)
    assert count_of(sheet, (216, 216, 216)) == 64 * 64 // 2


def test_damaged_image_has_a_tile_that_says_so_when_drawn() -> None:
    """Its reason, in a box of another colour, which stays in the box."""
    told = draw_sheet([Tile("k", "jpg", None, "does not decode: " + "cut off " * 100)], size=100)
    silent = draw_sheet([Tile("k", "jpg", None, "")], size=100)
    assert count_of(silent, (250, 225, 225)) == 100 * 112
    ink = np.argwhere((np.asarray(told) != np.asarray(silent)).any(axis=2))
    assert len(ink) > 500
    assert (ink.min(axis=0) >= 8).all()
    assert (ink.max(axis=0) < 8 + np.array([100, 112])).all()


def test_keys_stand_below_when_drawn() -> None:
    """Exactly as the font writes them."""
    with_key, without = draw_sheet([tile("0/000012")], size=128), draw_sheet([tile("")], size=128)
    expected = Image.new("RGB", (128, 17), (255, 255, 255))
    ImageDraw.Draw(expected).text((0, 2), "0/000012", fill=(20, 20, 20), font=ImageFont.load_default(13))
    assert with_key != without
    assert np.array_equal(np.asarray(with_key.crop((8, 8 + 128, 136, 8 + 128 + 17))), np.asarray(expected))


@pytest.mark.parametrize("text", ["a" * 400, "train/000/000123456789" * 9])
def test_text_is_shortened_in_its_middle_when_too_wide(text: str) -> None:
    """As much as fits, of both ends."""
    font = ImageFont.load_default(13)
    assert isinstance(font, ImageFont.FreeTypeFont)
    cut = fit_text(text, font, 100)
    assert 80 < font.getlength(cut) <= 100
    assert [fit_text(short, font, 100) for short in ("x", "")] == ["x", ""]
    head, _, tail = cut.partition("...")
    assert len(head) > 2
    assert text.startswith(head)
    assert text.endswith(tail)


def test_letters_are_escaped_when_no_font_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key of empty boxes would name nothing."""
    monkeypatch.setattr(contact_sheets, "_OTHER_FONTS", ("no-such-font.ttf",))
    text, font = contact_sheets._with_font("a猫b")
    assert text == r"a\u732bb"
    assert font.getname()[0] == "Aileron"


def test_letters_are_escaped_alone_when_another_font_has_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """One emoji does not escape the words beside it."""
    fonts = {None: "a", "first": "a猫", "second": "a猫犬", "third": "a猫犬"}
    monkeypatch.setattr(contact_sheets, "_OTHER_FONTS", ("first", "second", "third"))
    monkeypatch.setattr(contact_sheets, "_has_glyph", lambda name, letter: letter in fonts[name])
    monkeypatch.setattr(contact_sheets, "_font", str)
    assert contact_sheets._with_font("a🐈猫犬") == (r"a\U0001f408猫犬", "second")


def test_font_is_the_default_when_it_has_all_letters() -> None:
    """The same sheet on every machine, for most keys."""
    text, font = contact_sheets._with_font("train/0001_a-b.x")
    assert (text, font.getname()[0]) == ("train/0001_a-b.x", "Aileron")


def test_control_characters_are_escaped_when_in_a_key() -> None:
    """Pillow would draw several lines."""
    assert draw_sheet([tile("a\nb")], size=128) == draw_sheet([tile(r"a\nb")], size=128)


def test_sheet_is_refused_when_there_is_too_much() -> None:
    """Before any memory is taken."""
    with pytest.raises(UsageError, match=r"is too large: draw fewer or smaller"):
        draw_sheet([tile()] * 3, size=20_000)


# -------------------------------------------------------------------------------------------------------------- labels
def test_labels_have_the_ink_of_damage_when_a_field_does_not_decode() -> None:
    """The reason must not look like the field's text."""
    sheet = draw_sheet([tile()._replace(labels=[Label("cls: does not decode", is_damaged=True), Label("txt: a")])])
    assert count_of(sheet, (150, 0, 0)) > 20
    assert count_of(draw_sheet([labelled("cls: does not decode")]), (150, 0, 0)) == 0


def labelled(*labels: str) -> Tile:
    return tile()._replace(labels=[Label(text) for text in labels])


def inked_rows(sheet: Image.Image, below: int) -> int:
    """How many lines of a tile are written below its image, key and field."""
    rows = (np.asarray(sheet.convert("L"))[below + 8 + 2 + 2 * 17 :] < 128).any(axis=1)
    return sum(rows[start : start + 17].any() for start in range(0, len(rows), 17))


def test_labels_stand_below_the_key_when_drawn() -> None:
    """Exactly as the font writes them, a line each; the tiles of a sheet are equally high."""
    plain, sheet = (
        draw_sheet([tile(), tile()], size=128),
        draw_sheet([labelled("cls: 7", "txt: a cat"), tile()], size=128),
    )
    assert sheet.size == (plain.width, plain.height + 2 * 17)
    for number, text in enumerate(("cls: 7", "txt: a cat")):
        expected = Image.new("RGB", (128, 17), (255, 255, 255))
        ImageDraw.Draw(expected).text((0, 0), text, fill=(20, 20, 20), font=ImageFont.load_default(13))
        top = 8 + 128 + 2 + (2 + number) * 17
        assert np.array_equal(np.asarray(sheet.crop((8, top, 136, top + 17))), np.asarray(expected))
    assert sheet.crop((144, 0, 272, plain.height - 8)) == plain.crop((144, 0, 272, plain.height - 8))


@pytest.mark.parametrize("word", ["word ", "x", "\n", "猫", "قطة ", "🐈"], ids=ascii)
def test_long_labels_are_cut_after_three_lines(word: str) -> None:
    """Words or none, whatever the script is: they stay in their tile, and the line after them is another field's."""
    sheet = draw_sheet([labelled(word * 100, "cls: 7"), labelled("b"), labelled("c")], size=112)
    assert sheet.height == draw_sheet([tile()], size=112).height + 4 * 17
    assert inked_rows(sheet.crop((8, 0, 8 + 112, sheet.height)), 112) == 4
    assert (np.asarray(sheet.crop((120, 8, 127, sheet.height))) == 255).all()


@pytest.mark.parametrize(
    ("text", "lines"), [("", 0), ("  ", 0), ("a", 1), ("a " * 50, 3), ("\ud800\x00", 1), ("\ud800\x00\u202e", 2)]
)
def test_labels_take_as_many_lines_as_they_need(text: str, lines: int) -> None:
    """None where there is nothing to read; what is no character of its own is escaped."""
    assert (draw_sheet([labelled(text)], size=112).height - draw_sheet([tile()], size=112).height) / 17 == lines


def test_labels_are_cut_after_ten_lines_together() -> None:
    """A sample of a hundred fields leaves room for the others."""
    sheet = draw_sheet([labelled(*(f"field{number}: value" for number in range(100)))], size=112)
    assert sheet.height == draw_sheet([tile()], size=112).height + 10 * 17
    assert inked_rows(sheet, 112) == 10


def test_wrapped_lines_have_all_of_a_text_when_there_is_room() -> None:
    """In order, and none wider than it may be; a character that is wider than the line still has one."""
    font = ImageFont.load_default(13)
    assert isinstance(font, ImageFont.FreeTypeFont)
    text = "some words of different lengths, andonethatistoolongforaline, and an end"
    lines = contact_sheets._wrap(text, font, 90, 100)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(font.getlength, lines)) <= 90
    assert contact_sheets._wrap("WW", font, 3, 9) == ["W", "W"]
