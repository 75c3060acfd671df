"""The command line as a whole: arguments, messages, progress and exit statuses."""

import argparse
import contextlib
import io
import logging
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits import tool_kit
from tests.kits.processes import in_child
from tests.kits.shards import write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli import help, inputs, main, split, terminal
from torchdata_wds.cli.command import Command, UsageError, byte_size, positive_number, range_of, whole_number
from torchdata_wds.errors import Advice, ShardOpenError


def with_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Puts a command in the table that does what a test wants."""
    monkeypatch.setitem(main.COMMANDS, "try", Command("Try.", lambda parser: None, run))


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--workers", "-1"], ["demo", "--workers", "two"]])
def test_main_exits_with_2_when_arguments_are_wrong(arguments: list[str]) -> None:
    """Argparse says what is valid."""
    done = run_wds(*arguments)
    assert (done.status, done.out) == (2, b"")
    assert "usage: wds" in done.err


def test_main_says_how_options_of_other_programs_are_spelled_here() -> None:
    """In the first line; the usage follows."""
    for line, hint in (
        ("split -n 5 -o x --maxshards 2 x.tar", "for --maxshards write --max-shards"),
        ("split --num-samples=5 x.tar", "for --num-samples write -n"),
        ("split -o x -z x.tar", "for -z write --compress gz"),
        ("split -o x -p 'echo %s' x.tar", "for -p write --post"),
        ("proc -m 'command' x.tar", "for -m write -c, and end the command with: rm -f sample.*"),
        ("proc -c true -e skip x.tar", "for -e write --errors"),
        ("proc -c true --add-log=log x.tar", "for --add-log write --log-field"),
        ("sort -s cls x.tar", "for -s write -k"),
        ("sort --sorttype int x.tar", "for --sorttype write --type"),
        ("cat --shardslice 0:3 x.tar", "for --shardslice write --shard-slice"),
        ("cat -l list.txt", "for -l write name the list as a shard, '@list.txt'"),
        ("first --select 'True' x.tar", "for --select write --where FIELD=VALUE"),
        ("tsv -f cls --nokey x.tar", "for --nokey write --no-key"),
    ):
        command = line.split()[0]
        done = run_wds(*shlex.split(line))
        assert done.status == 2
        first, *usage = done.err.splitlines()
        assert first.startswith(f"wds {command}: error: in 'wds {command}', {hint}; ")
        assert usage[0].startswith(f"usage: wds {command} ")


def test_main_says_first_what_is_wrong() -> None:
    """With the command that it is about."""
    for line, said in (
        ("ls --totls x.tar", "wds ls: error: did you mean --totals?; unknown arguments: --totls"),
        ("ls x.tar --frobnicate 5", "wds ls: error: unknown arguments: --frobnicate"),
        ("cache list x --frobnicate", "wds cache: error: unknown arguments: --frobnicate"),
        ("cache clear", "wds cache clear: error: the following arguments are required: FOLDER"),
        ("nonsense", "wds: error: argument COMMAND: invalid choice: 'nonsense'"),
    ):
        done = run_wds(*line.split())
        assert done.status == 2
        assert done.err.startswith(said)


def test_hints_are_about_options_that_commands_have() -> None:
    """What a hint says to write exists, and what it is for does not."""
    for command, told in help._FOREIGN.items():
        known = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", run_wds(command, "--help").text))
        assert known.isdisjoint(" ".join(told).split()), command
        for text in told.values():
            if text.startswith("-"):
                assert text.split()[0].rstrip(",") in known, (command, text)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("a without b"), 2, "wds try: error: a without b\n"),
        (ShardOpenError("no shard"), 1, "wds try: error: no shard\n"),
        (RuntimeError("it\nThis exception is thrown by __iter__ of X()"), 1, "wds try: error: it\n"),
        (
            ShardOpenError("exists;", advice=Advice("overwrite=True does not ask", "--force does not ask")),
            1,
            "wds try: error: exists; --force does not ask\n",
        ),
        (MemoryError(), 1, "wds try: error: not enough memory for these arguments, or for one sample\n"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 0, ""),
    ],
    ids=["usage", "ours", "torch", "words", "memory", "interrupted", "pipe"],
)
def test_main_turns_exceptions_into_messages(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line on stderr, in the program's words, and the status of each kind."""

    def fail(_: argparse.Namespace) -> int:
        raise error

    with_command(monkeypatch, fail)
    assert run_wds("try") == (status, b"", message)


def test_main_fails_when_the_output_cannot_be_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that has succeeded so far has not, where the disk is full at its end."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    with_command(monkeypatch, lambda _: 0)
    monkeypatch.setattr(sys, "stdout", Full())
    assert main.main(["try"]) == 1


def test_main_says_the_library_s_warnings_and_lets_go_of_its_logger(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to stderr, with the program's name."""
    logger = logging.getLogger("torchdata_wds")

    def warn(_: argparse.Namespace) -> int:
        logging.getLogger("torchdata_wds.storage.x").warning(
            "wait: %s", "pass overwrite=True", extra={"cli_message": "wait: pass --force"}
        )
        logging.getLogger("torchdata_wds.storage.x").warning("go on")
        return 0

    before = list(logger.handlers)
    with_command(monkeypatch, warn)
    assert run_wds("try") == (0, b"", "wds: wait: pass --force\nwds: go on\n")
    assert logger.handlers == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=["SIGTERM", "SIGHUP"])
def test_main_ends_tidily_when_it_is_terminated(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal unwinds the command, as Ctrl-C does, and a second one does not disturb; then it means what it did."""
    tidied = []

    def wait(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            os.kill(os.getpid(), number)
            tidied.append(True)
        return 0

    with_command(monkeypatch, wait)
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup, which has it ignored
    try:
        assert run_wds("try") == (128 + number, b"", "")
        assert tidied
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_main_knows_the_signal_when_compiled_code_replaces_the_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's functions raise a plain KeyboardInterrupt when a signal's handler has raised something."""

    def wait(_: argparse.Namespace) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except KeyboardInterrupt:
            pass
        raise KeyboardInterrupt

    with_command(monkeypatch, wait)
    assert run_wds("try") == (143, b"", "")


def test_main_goes_on_when_a_closed_terminal_is_to_be_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what nohup is for."""
    monkeypatch.setattr(main, "_ENDING", (signal.SIGHUP,))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with_command(monkeypatch, lambda _: os.kill(os.getpid(), signal.SIGHUP) or 0)
    try:
        assert run_wds("try").status == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_main_refuses_when_standard_output_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be printed would be lost."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", errors)
    assert main.main(["ls", "x.tar"]) == 1
    assert "standard output is closed" in errors.getvalue()


def test_main_says_what_it_can_when_nobody_reads_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of standard error that has gone away is no reason to stop, nor one of standard output."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    def speak(_: argparse.Namespace) -> int:
        with contextlib.redirect_stderr(Gone()):
            terminal.say("one")
        return 1

    with_command(monkeypatch, speak)
    assert run_wds("try").status == 1


def test_main_leaves_forked_children_to_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have nothing to tidy, and end at once."""
    codes = []

    def fork(_: argparse.Namespace) -> int:
        codes.append(in_child(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(10))))
        return 0

    with_command(monkeypatch, fork)
    assert run_wds("try").status == 0
    assert codes == [-signal.SIGTERM]


@pytest.mark.parametrize("name", sorted(main.COMMANDS))
def test_help_of_each_command_shows_what_it_does_and_an_example(name: str) -> None:
    """The example is one of the command itself."""
    done = run_wds(name, "--help")
    command = main.COMMANDS[name]
    assert done.status == 0
    assert command.summary in " ".join(done.text.split())
    assert f"wds {name} " in command.example
    assert command.example.split("\n")[0].strip() in done.text


def test_help_lists_all_commands() -> None:
    """With what they do."""
    text = " ".join(run_wds("--help").text.split())
    assert all(f"{name} {command.summary}" in text for name, command in main.COMMANDS.items())


def test_arguments_are_read_as_meant() -> None:
    """Sizes in units of ten and of two; ranges as Python has them."""
    for kind, text, value in (
        (whole_number, "0", 0),
        (positive_number, "12", 12),
        (byte_size, "1e9", 1e9),
        (byte_size, "500MB", 500e6),
        (byte_size, "2GiB", 2 * 2**30),
        (byte_size, "1.5k", 1500),
        (byte_size, "100", 100),
        (range_of, "5", slice(5, 6)),
        (range_of, "2:10:3", slice(2, 10, 3)),
        (range_of, ":4", slice(None, 4, None)),
        (range_of, "::2", slice(None, None, 2)),
        (range_of, "7:", slice(7, None, None)),
    ):
        assert kind(text) == value


def test_arguments_are_refused_when_they_are_none() -> None:
    """The message says what was expected and what was found."""
    for kind, text in (
        (whole_number, "-1"),
        (whole_number, "²"),
        (whole_number, "9" * 5000),
        (range_of, "0:9223372036854775808"),
        (positive_number, "0"),
        (byte_size, "0"),
        (byte_size, "-5"),
        (byte_size, "5 apples"),
        (byte_size, "5i"),
        (range_of, ""),
        (range_of, "-1:"),
        (range_of, "1:2:0"),
        (range_of, "1:2:3:4"),
        (range_of, "a:b"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=r"expected .* not "):
            kind(text)


# ------------------------------------------------------------------------------------------------------- progress
class Terminal:
    """A stderr that says what it is and keeps what is written."""

    encoding = "utf-8"

    def __init__(self, on_terminal: bool) -> None:
        self.on_terminal = on_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self.on_terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("kind", "expected"), [("file", True), ("null", True), ("pipe", False), ("terminal", False)])
def test_stdout_is_apart_when_it_cannot_come_among_the_lines_of_a_terminal(
    kind: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe may lead to ``cat``, and so to the terminal."""
    if kind == "pipe":
        descriptors = os.pipe()
    elif kind == "terminal":
        descriptors = os.openpty()
    else:
        descriptors = (os.open(os.devnull if kind == "null" else tmp_path / "x", os.O_RDWR | os.O_CREAT),)
    with open(descriptors[-1], "w", closefd=False) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert terminal.stdout_is_apart() is expected
        monkeypatch.undo()
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(("apart", "shown"), [(True, True), (False, False)])
@pytest.mark.parametrize("command", ["ls", "json", "tsv -f cls", "cat", "proc -c true", "split -n 9 -o out"])
def test_bar_is_not_mixed_into_what_a_command_prints(
    command: str, apart: bool, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``| cat``: lines and bar would come on one terminal. A file keeps them apart."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, (3,))
    screen = Terminal(True)
    monkeypatch.setattr(inputs, "stdout_is_apart", lambda: apart)
    monkeypatch.setattr(split, "stdout_is_apart", lambda: apart)
    monkeypatch.setattr(tool_kit, "redirect_stderr", lambda _: contextlib.redirect_stderr(screen))
    assert run_wds(*command.split(), "shard-000000.tar").status == 0
    assert ("? left" in screen.text) is (shown and command != "ls")


def test_messages_do_not_share_a_line_with_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken away, and drawn again below."""
    screen = Terminal(True)
    monkeypatch.setattr(sys, "stderr", screen)
    with terminal.Progress("samples", 3) as bar:
        bar.advance(2)
        terminal.say("look")
    before, _, after = screen.text.partition("wds: look\n")
    assert before.rstrip(" ").endswith("\r")
    assert after.startswith("\r ")
    assert "of 3 samples" in after
    assert terminal._bars == []
