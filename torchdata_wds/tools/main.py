"""The command line: finds the command, and turns exceptions into messages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchdata_wds import __version__
from torchdata_wds.errors import WdsError
from torchdata_wds.tools import demo
from torchdata_wds.tools.command import Command

__all__ = ["COMMANDS", "main"]

PROGRAM = "python -m torchdata_wds"
INTERRUPTED = 130  # what a shell reports of a process that Ctrl-C has ended

COMMANDS: dict[str, Command] = {"demo": demo.COMMAND}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: What follows the program's name; None takes it from ``sys.argv``.

    Returns:
        The exit status: 0 for success, 1 for a failure, 130 after Ctrl-C. Wrong arguments exit with 2.
    """
    chosen = _parser().parse_args(arguments)
    try:
        return COMMANDS[chosen.command].run(chosen)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (WdsError, OSError, ImportError, RuntimeError) as error:
        print(f"{PROGRAM} {chosen.command}: error: {_message(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools for WebDataset shards.")
    parser.add_argument("--version", action="version", version=f"torchdata_wds {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.summary, description=command.summary))
    return parser


def _message(error: Exception) -> str:
    """The error's own text, without the pipe that torch names behind it."""
    text = str(error).partition("\nThis exception is thrown by ")[0].strip()
    return text or type(error).__name__
