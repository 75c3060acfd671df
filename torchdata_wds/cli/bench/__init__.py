"""Measure how fast this machine reads a data set, or runs a pipe: by stage and by number of workers.

wds bench --seconds 4 --decode rgb8 'train-{000000..000003}.tar'
wds bench --seconds 2 --workers 0,2 --chart bench.png train-*.tar
wds bench --seconds 2 --json - pipes:training_pipe
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torchdata_wds.cli.bench.charts import draw_chart
from torchdata_wds.cli.command import Command, UsageError, add_force, choice, flag, option, positive_number
from torchdata_wds.cli.map import FUNCTION_NAME, function_name
from torchdata_wds.cli.map.shard_tasks import error_text
from torchdata_wds.cli.outputs import one_output, write_line, write_whole
from torchdata_wds.cli.terminal import Progress, printable, say
from torchdata_wds.errors import SampleError, WdsError
from torchdata_wds.program_interrupts import armed
from torchdata_wds.storage import mask_url
from torchdata_wds.storage.urls import STDIN, is_local

if TYPE_CHECKING:
    from torchdata_wds.cli.bench.subjects import Subject

_SECONDS, _WORKERS = 10.0, (0, 1, 2, 4)
_MOST_WORKERS = 1024


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    text = (
        "a function without arguments that returns a pipe or a WdsLoader; or shards: paths and URLs with braces or "
        "globs, folders, '@list.txt' with one of these per line"
    )
    option(parser, "shards", "FUNCTION|SHARDS", text, nargs="+")
    flag(parser, "--allow-pipe", "allow commands (pipe:) in lists (@list.txt)")
    parser.set_defaults(part=None)
    group = parser.add_argument_group("shards", "what is done with shards; a function decides for itself")
    text = "decode all fields, and images to this: rgb8, torchrgb, pil and so on (default: samples stay bytes)"
    option(group, "--decode", "IMAGES", text)
    option(group, "--batch", "N", "samples in a batch (default: 64)", positive_number)
    text = "on damage: stop, or skip what is lost with a warning (default: stop)"
    choice(group, "--errors", ("stop", "skip"), text, "stop")
    group = parser.add_argument_group("measuring")
    text = f"how long to measure in all; the start of workers comes on top (default: {_SECONDS:g})"
    option(group, "--seconds", "S", text, _seconds, default=_SECONDS)
    text = f"numbers of workers to try (default: {','.join(map(str, _WORKERS))})"
    option(group, "--workers", "N,N,...", text, _numbers)
    text = "a training step, a function of one batch: its rate with ten batches in memory is compared with the loader's"
    option(group, "--step", "MODULE:FUNCTION", text, function_name)
    group = parser.add_argument_group("output", "the default is tables on standard output")
    option(group, "--json", "FILE", "write all figures as JSON; '-' is standard output, without the tables", one_output)
    option(group, "--chart", "FILE", "draw a chart, x.png", _picture_name)
    add_force(group)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) <= _MOST_WORKERS for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers of workers such as 0,1,2,4, not {text!r:.60}")
    return [int(part) for part in parts]


def _picture_name(text: str) -> str:
    if not mask_url(text).partition("?")[0].lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .png, not {mask_url(text)!r}")
    return one_output(text)


def _is_function_name(names: Sequence[str]) -> bool:
    """Returns whether the command's arguments are one ``module:function``, and not shards."""
    is_name = len(names) == 1 and FUNCTION_NAME.fullmatch(names[0]) is not None
    return is_name and not names[0].startswith(("pipe:", "file:")) and not os.path.lexists(names[0])


def _run(arguments: argparse.Namespace) -> int:
    is_function = _is_function_name(arguments.shards)
    if is_function and not (arguments.decode is None and arguments.batch is None and arguments.errors == "stop"):
        raise UsageError("--decode, --batch and --errors are for shards: the function decides what its pipe does")
    for output in (arguments.json, arguments.chart):  # before it takes time
        if output not in (None, STDIN) and not arguments.force and is_local(output) and os.path.lexists(output):
            raise FileExistsError(f"{printable(output)} already exists: pass another name, or --force to replace it")
    with armed():  # compiled modules lose a KeyboardInterrupt while they are imported
        import torchdata_wds.workers.profile.profiling  # noqa: F401
        from torchdata_wds.cli.bench.subjects import find_subject
    try:
        with find_subject(arguments, is_function=is_function) as subject:
            _bench(arguments, subject)
    except (WdsError, OSError, ImportError, RuntimeError, MemoryError, UsageError):  # `main` shows these
        raise
    except Exception as error:  # noqa: BLE001  (of the user's functions)
        say(f"error: {error_text(error)}", "bench")
        return 1
    return 0


def _bench(arguments: argparse.Namespace, subject: Subject) -> None:
    from torchdata_wds.workers.profile.profiling import Profiler
    from torchdata_wds.workers.profile.taking import EmptyEpochError

    workers = arguments.workers or {*_WORKERS, subject.workers}
    try:
        profiler = Profiler(subject.pipe, arguments.seconds, workers, step=subject.step)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    with Progress("parts measured", profiler.parts, summarizes=True) as progress:
        try:
            profile = profiler.run(progress.advance)
        except EmptyEpochError as error:
            raise SampleError(str(error)) from error
    if arguments.chart is not None:
        write_whole(draw_chart(profile, subject.name), arguments.chart, overwrite=arguments.force)
    text = json.dumps({"subject": subject.name, **profile.to_plain()}, indent=2)
    if arguments.json == STDIN:
        write_line(text)
        return
    if arguments.json is not None:
        write_whole([text.encode() + b"\n"], arguments.json, overwrite=arguments.force)
    write_line(profile.report())


COMMAND = Command(__doc__, _add_arguments, _run)
