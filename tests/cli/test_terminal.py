"""Names of strangers on a terminal, and shortened texts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli.terminal import printable, shorten


def test_printable_escapes_when_a_character_would_act() -> None:
    """Letters stay; what moves the cursor, hides or turns the line is written out."""
    for text, shown in (
        ("größe 猫 кошка", "größe 猫 кошка"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\tb\nc\x7f\x9b", r"a\tb\nc\x7f\x9b"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("a\u200bb\u00a0c", r"a\u200bb\xa0c"),
        ("\ud800", r"\ud800"),
    ):
        assert printable(text) == shown


@settings(max_examples=30, deadline=None)
@given(st.text(), st.integers(0, 20))
def test_shortened_texts_keep_to_the_width_when_cut(text: str, width: int) -> None:
    """Neither is longer than asked for, and a text that fits stays as it is."""
    for cut in (shorten(text, width), shorten(text, width, middle=True)):
        assert len(cut) <= width
        assert cut == text or len(text) > width


def test_shorten_middle_keeps_both_ends_when_cut() -> None:
    """Keys of one folder differ at their ends."""
    assert shorten("train/000/000123", 9, middle=True) == "tra...123"
    assert shorten("train/000/000123", 9) == "train/..."
