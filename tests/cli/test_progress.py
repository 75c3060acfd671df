"""The bars of the commands: what they show on a terminal, and that nothing else gets any."""

import contextlib
import fcntl
import io
import os
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits import tool_kit
from tests.kits.shards import write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli import terminal
from torchdata_wds.cli.terminal import Progress


class Screen(io.StringIO):
    """A terminal, in the place of standard error."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def on_terminal(monkeypatch: pytest.MonkeyPatch, drafts: list[str]) -> Iterator[None]:
    """Runs a block whose standard error, and that of `run_wds`, is a terminal; adds what it shows to `drafts`."""
    screen = Screen()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        patch.setattr(tool_kit, "redirect_stderr", lambda _: contextlib.redirect_stderr(screen))
        patch.setattr(terminal, "_BAR_SECONDS", 0.0)
        yield
    drafts += screen.getvalue().split("\r")


def last_bar(drafts: list[str]) -> str:
    """The last draft of a bar, without its drawing."""
    draft = [draft for draft in drafts if "%|" in draft][-1]
    return draft.partition("%|")[0].strip() + "%" + draft.rpartition("|")[2].rstrip()


def slow_samples(urls: list[str]) -> Iterator[dict[str, Any]]:
    for url in urls:
        yield {"__key__": "a", "__url__": url}


def test_bar_shows_shards_samples_bytes_and_time_when_local_shards_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bar itself goes by bytes; at the end stands how long it took."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (3, 0, 2))
    drafts: list[str] = []
    with on_terminal(monkeypatch, drafts):
        assert run_wds("cat", "shard-*.tar", "-o", "all.tar").status == 0
    assert "0%|" in drafts[1]
    assert "| 0 of 3 shards, ? left" in drafts[1]
    assert any("1 of 3 shards" in draft or "2 of 3 shards" in draft for draft in drafts)
    shown = last_bar(drafts)
    assert shown.startswith("100% 3 of 3 shards, 5 samples, ")
    assert "B/s, 00:" in shown


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param("index shard-*.tar", "100% 3 of 3 shards, 5 samples", marks=pytest.mark.slow),  # starts processes
        ("validate shard-*.tar", "100% 3 of 3 shards, 5 samples"),
        pytest.param("stats shard-*.tar", "100% 3 of 3 shards, 5 samples", marks=pytest.mark.slow),
        ("sort shard-*.tar -o sorted.tar", "100% 5 of 5 samples written"),
        ("cat shard-*.tar --slice 1:3 -o two.tar", "100% 2 of 2 samples"),
        ("cat shard-*.tar --order 1 -o ordered.tar", "100% 5 of 5 samples"),
        ("cat shard-*.tar --shard-slice 0:1 -o two.tar", "100% 3 of 3 shards, 2 samples"),
        ("split shard-*.tar -n 2 -o part", "100% 3 of 3 shards, 5 samples"),
        ("ls -q shard-*.tar", "100% 3 of 3 shards, 5 samples"),
        ("create recipe.txt -o made.tar", "100% 1 of 1 samples"),
        ("proc -c true shard-*.tar -o out/", "100% 3 of 3 shards"),
    ],
)
def test_bar_is_shown_when_a_command_reads_or_writes_shards(
    command: str, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; not a word of it in a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchdata_wds.cli.split.stdout_is_apart", lambda: True)
    monkeypatch.setattr("torchdata_wds.cli.validate.stdout_is_apart", lambda: True)
    write_text_shards(tmp_path, (3, 0, 2))
    Path("recipe.txt").write_text("a.txt\ttext:abc\n")
    drafts: list[str] = []
    with on_terminal(monkeypatch, drafts):
        assert run_wds(*command.split()).status == 0, drafts
    assert last_bar(drafts).startswith(shown)


@pytest.mark.parametrize("command", [pytest.param("index", marks=pytest.mark.slow), "cat -o all.tar"])
def test_nothing_is_shown_when_standard_error_is_not_a_terminal(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe, a log file: only what the command says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(terminal, "_SECONDS", 0.0)
    write_text_shards(tmp_path, (3, 2))
    done = run_wds(*command.split(), *map(str, tmp_path.glob("shard-*.tar")))
    assert done.status == 0
    assert all(line.startswith("wds: ") for line in done.err.splitlines())
    assert "\r" not in done.err


@pytest.mark.slow
def test_bar_is_shown_when_a_program_has_a_pseudo_terminal(tmp_path: Path) -> None:
    """As wide as it is; not a word in a file, or without it."""
    write_text_shards(tmp_path, (30, 20))
    command = [sys.executable, "-m", "torchdata_wds", "cat", *map(str, tmp_path.glob("*.tar")), "-o", "all.tar"]
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
    with subprocess.Popen(command, cwd=tmp_path, stderr=side, stdin=subprocess.DEVNULL) as process:
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # when the program has ended
            while part := os.read(main, 1 << 16):
                shown += part
        assert process.wait(timeout=300) == 0
    os.close(main)
    drafts = shown.decode().replace("\r\n", "\n").split("\r")
    assert last_bar(drafts).startswith("100% 2 of 2 shards, 50 samples")
    assert {len(draft.rstrip("\n")) for draft in drafts if "%|" in draft} <= {88, 89, 90}
    with (tmp_path / "log.txt").open("w") as log:
        subprocess.run([*command, "--force"], cwd=tmp_path, stderr=log, stdin=subprocess.DEVNULL, check=True)
    assert (tmp_path / "log.txt").read_text() == ""


def test_lines_are_shown_when_tqdm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, every few seconds, and a last one unless the command says what was done."""
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(terminal, "_SECONDS", 0.0)
    for summarizes in (False, True):
        drafts: list[str] = []
        with on_terminal(monkeypatch, drafts):
            with Progress("samples", 3, summarizes=summarizes) as bar:
                bar.advance(2)
            with Progress("samples", 3, hidden=True) as bar:
                bar.advance(3)
        assert "".join(drafts) == "2 of 3 samples\n" + "2 of 3 samples\n" * (not summarizes)


def test_bar_goes_by_shards_when_their_sizes_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server or a pipe; a bar without any total shows what was done."""
    drafts: list[str] = []
    urls = [f"https://example.org/{number}.tar" for number in range(4)]
    with on_terminal(monkeypatch, drafts), contextlib.suppress(RuntimeError), Progress("samples", urls=urls) as bar:
        for sample in bar.over(slow_samples(urls)):
            if sample["__url__"] == urls[3]:
                raise RuntimeError
    assert " 75%|" in "".join(drafts)
    drafts.clear()
    with on_terminal(monkeypatch, drafts), Progress("samples") as bar:
        bar.advance(5, size=1)
    assert "%" not in "".join(drafts)
    assert drafts[-2].startswith("5 samples, ")


def test_bar_counts_each_sample_once_when_shards_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never goes back."""
    drafts: list[str] = []
    with on_terminal(monkeypatch, drafts), Progress("samples", urls=["a", "b", "c"]) as bar:
        assert len(list(bar.over(slow_samples(["a", "b", "a", "b", "c"])))) == 5
        assert bar.done == 5
    assert last_bar(drafts).startswith("100% 3 of 3 shards, 5 samples")


def test_progress_starts_no_thread_when_it_is_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are not forked beside one, and take seconds to start otherwise."""
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", shown)
    before = threading.active_count()
    with Progress("shards", 2) as progress:
        progress.advance(samples=5)
        assert threading.active_count() == before
    assert "5 samples" in shown.getvalue()
    assert terminal._bars == []
