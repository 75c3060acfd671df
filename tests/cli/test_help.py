"""``wds help``: the manual's topics."""

import os
import pty
import pydoc
import sys
from pathlib import Path

import pytest

import torchdata_wds
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.main import main

MANUAL = {path.stem: path.read_text() for path in Path(torchdata_wds.__file__).parent.glob("docs/*.md")}


def test_help_lists_every_topic_with_its_title_when_none_is_named() -> None:
    """One a line, sorted."""
    done = run_wds("help")
    assert (done.status, done.err) == (0, "")
    listed = [tuple(line.split(maxsplit=1)) for line in done.text.splitlines() if line.startswith("  ")]
    assert listed == sorted((topic, text.splitlines()[0].removeprefix("# ")) for topic, text in MANUAL.items())


@pytest.mark.parametrize("topic", sorted(MANUAL))
def test_help_prints_the_page_as_it_is_when_output_is_not_a_terminal(topic: str) -> None:
    """Output to a pipe or a file is not paged."""
    done = run_wds("help", topic)
    assert (done.status, done.text, done.err) == (0, MANUAL[topic], "")


@pytest.mark.parametrize(
    ("topic", "suggested"), [("resum", "resume"), ("trap", "traps"), ("Workers", "workers"), ("zzz", None)]
)
def test_help_lists_the_topics_when_there_is_no_such_topic(topic: str, suggested: str | None) -> None:
    """The nearest one is suggested, if any is near; it is a wrong argument."""
    done = run_wds("help", topic)
    assert (done.status, done.text) == (2, "")
    assert f"unknown topic {topic!r}" in done.err
    assert ", ".join(sorted(MANUAL)) in done.err
    assert ("did you mean" in done.err) == (suggested is not None)
    assert suggested is None or f"did you mean {suggested!r}?" in done.err


def test_help_uses_the_pager_when_output_is_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PAGER gets the page."""
    shown = tmp_path / "shown.md"
    for name, value in {"PAGER": f"cat > '{shown}'", "MANPAGER": "", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pydoc, "pager", pydoc.pager)  # which replaces itself when it is called
    controller, terminal = pty.openpty()
    with os.fdopen(controller, "rb"), os.fdopen(terminal) as stdin, os.fdopen(os.dup(terminal), "w") as stdout:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", stdout)
        status = main(["help", "trust"])
        monkeypatch.undo()
    assert status == 0
    assert shown.read_text() == MANUAL["trust"]
