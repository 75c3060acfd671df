"""Names of strangers on a terminal, and shortened texts."""

import io
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli import terminal
from torchdata_wds.cli.terminal import Progress, printable, shorten


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


def test_progress_shows_a_note_when_it_is_not_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line every few seconds; the last line is left to a command that summarizes."""
    monkeypatch.setattr(terminal, "_SECONDS", 0.0)
    with Progress("shards", 2, summarizes=True) as progress:
        progress.advance(note="5 samples")
        progress.advance()
    assert capsys.readouterr().err == "1 of 2 shards, 5 samples\n2 of 2 shards\n"
    monkeypatch.setattr(terminal, "_SECONDS", 100.0)
    for summarizes in (True, False):
        with Progress("shards", 2, summarizes=summarizes) as progress:
            progress.advance(note="5 samples")
        assert capsys.readouterr().err == ("" if summarizes else "1 of 2 shards, 5 samples\n")


def test_progress_starts_no_thread_when_it_is_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are not forked beside one, and take seconds to start otherwise."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    before = threading.active_count()
    with Progress("shards", 2) as progress:
        progress.advance(note="5 samples")
        assert threading.active_count() == before
    assert "5 samples" in shown.getvalue()
