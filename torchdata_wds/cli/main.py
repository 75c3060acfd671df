"""The command line: finds the command, and turns exceptions into messages."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
import textwrap
import threading
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torchdata_wds import __version__
from torchdata_wds.cli.command import Command, UsageError
from torchdata_wds.cli.terminal import PROGRAM, discard_output, logged, message_of, open_nowhere, say
from torchdata_wds.errors import WdsError
from torchdata_wds.program_interrupts import INTERRUPTED, arm, disarm

WRONG_USE = 2  # argparse's exit status
SIGNALLED = 128  # a shell adds this to the number of the signal that ended a process
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class _Commands(UserDict[str, Any]):
    """The commands by name. Each is imported when it is looked up: all of them take longer than most take to run."""

    def __getitem__(self, name: str) -> Command:
        found = self.data[name]
        if isinstance(found, str):
            module, _, attribute = found.partition(":")
            found = self.data[name] = getattr(importlib.import_module(f"torchdata_wds.cli.{module}"), attribute)
        return found  # type: ignore[no-any-return]


COMMANDS = _Commands(
    {
        "ls": "ls:COMMAND",
        "show": "show:COMMAND",
        "stats": "stats:COMMAND",
        "tsv": "tables:TSV_COMMAND",
        "json": "tables:JSON_COMMAND",
        "first": "first:COMMAND",
        "cat": "cat:COMMAND",
        "create": "create:COMMAND",
        "split": "split:COMMAND",
        "sort": "sort:COMMAND",
        "proc": "proc:COMMAND",
        "map": "map:COMMAND",
        "index": "index:COMMAND",
        "validate": "validate:COMMAND",
        "card": "card:COMMAND",
        "cache": "cache:COMMAND",
        "bench": "bench:COMMAND",
        "demo": "demo:COMMAND",
        "help": "help:COMMAND",
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default that of ``sys.argv``, and returns the exit status.

    The status is 0 for success, 1 if anything was lost or refused, 2 for wrong arguments (by SystemExit if argparse
    finds them), 130 after Ctrl-C and 143 after SIGTERM. It is also 0 if the reader of the output goes away.
    """
    if arguments is not None:
        return _run(arguments)
    _fill_standard_files()
    try:
        return _run(sys.argv[1:])
    finally:
        arm()


def _run(arguments: Sequence[str]) -> int:
    if sys.stdout is None:
        say("error: standard output is closed; send what is not wanted to /dev/null")
        return 1
    chosen = _chosen(arguments)
    # up to here Ctrl-C ends the process at once; from now on it raises, so that the command can clean up
    try:
        disarm()
        with logged(), _ending_tidily():
            status = COMMANDS[chosen.command].run(chosen)
            sys.stdout.flush()
            return status
    except _Terminated as ended:
        return SIGNALLED + int(ended.args[0])
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return 0
    except UsageError as error:
        say(f"error: {error}", chosen.command)
        return WRONG_USE
    except (WdsError, OSError, ImportError, RuntimeError) as error:
        say(f"error: {message_of(error)}", chosen.command)
    except MemoryError:
        say("error: not enough memory for these arguments, or for one sample", chosen.command)
    return 1


class _Terminated(KeyboardInterrupt):
    """Raised for SIGTERM and SIGHUP, with the signal's number: the command cleans up as after Ctrl-C."""


@contextlib.contextmanager
def _ending_tidily() -> Iterator[None]:
    """Turns signals into an exception that ends this process tidily; forked children still end at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner = os.getpid()
    received: list[int] = []

    def end(number: int, _: object) -> None:
        if os.getpid() == owner:
            received.append(number)
            signal.signal(number, signal.SIG_IGN)  # cleaning up has begun
            raise _Terminated(number)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # a signal that is ignored stays ignored, such as SIGHUP under nohup
    numbers = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as error:
        if received and not isinstance(error, _Terminated):  # compiled code may raise a plain one in its place
            raise _Terminated(received[0]) from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fill_standard_files() -> None:
    """Opens ``/dev/null`` for closed standard files: otherwise the next files opened would take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            open_nowhere(number)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it stays open


class _Parser(argparse.ArgumentParser):
    """Prints what is wrong before the usage, with hints for options of similar programs."""

    command = ""
    words: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        from torchdata_wds.cli import help

        told = "; ".join((*help.hints(self.command, self.words, self._option_string_actions), message))
        say(f"error: {told}", self.prog.removeprefix(PROGRAM).strip())
        self.print_usage(sys.stderr)
        sys.exit(WRONG_USE)


def _chosen(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; makes only the parser of the chosen command if it exists, which is faster."""
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    parser = _Parser(prog=PROGRAM, description="Tools for WebDataset shards.")
    parser.add_argument("--version", action="version", version=f"torchdata_wds {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers = {}
    names = [] if list(arguments) == ["--version"] else COMMANDS
    for name in [wanted] if wanted in COMMANDS else names:
        command = COMMANDS[name]
        parsers[name] = commands.add_parser(
            name,
            help=command.summary,
            description=command.summary,
            epilog="example:\n" + textwrap.indent(command.example, "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parsers[name].command, parsers[name].words = name, arguments
        command.add_arguments(parsers[name])
    chosen, rest = parser.parse_known_args(arguments)
    if rest:
        parsers.get(chosen.command, parser).error(f"unknown arguments: {' '.join(rest)}")
    return chosen
