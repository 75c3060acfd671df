"""A shell command that is run for a file that has just been written."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Collection, Mapping
from contextlib import closing

from torchdata_wds.environment import is_secure
from torchdata_wds.errors import UnsafeDataError
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.sources.command import status_text
from torchdata_wds.storage.sources.command_guard import CommandGuard

_STDERR = 2

# An escaped character, a quoted string, a quote that is not closed, a variable, a place.
_TOKEN = re.compile(
    r"\\.|(?P<quoted>'[^']*'|\"(?:\\.|[^\"\\])*\")|(?P<open>['\"])|\$\{\w*|\{(?P<name>[a-z_]+)\}", re.DOTALL
)


class HookCommand:
    """A command for ``/bin/sh`` with places for values, each of which becomes one word, whatever is in it.

    Places are written as ``{path}``, outside of quotes. Standard input is empty, and what the command writes to
    standard output goes to standard error.

    Example:
        >>> hook = HookCommand("test {path} = $PWD'/it'", ["path"])
        >>> hook.fill({"path": "my file"})
        "test 'my file' = $PWD'/it'"
    """

    def __init__(self, template: str, names: Collection[str]) -> None:
        if is_secure():
            raise UnsafeDataError(f"{mask_text(template)!r} is a command, which WDS_SECURE=1 forbids")
        self._parts: list[tuple[str, bool]] = []  # text, and whether it is the name of a place
        start = 0
        for found in _TOKEN.finditer(template):
            if found["open"]:
                raise ValueError(f"{template!r} has a quote that is not closed: {template[found.start() :]!r}")
            inside = next((name for name in names if f"{{{name}}}" in (found["quoted"] or "")), None)
            if inside is not None:
                raise ValueError(
                    f"{{{inside}}} stands inside quotes in {template!r}: leave them out, it is quoted already"
                )
            name = found["name"]
            if name is None:
                continue
            if name not in names:
                there = ", ".join(f"{{{known}}}" for known in names)
                raise ValueError(f"{template!r} has an unknown place {{{name}}}: there are {there}")
            self._parts += [(template[start : found.start()], False), (name, True)]
            start = found.end()
        self._parts.append((template[start:], False))

    def fill(self, values: Mapping[str, object]) -> str:
        """Puts values into the places."""
        return "".join(shlex.quote(str(values[part])) if is_place else part for part, is_place in self._parts)

    def run(self, values: Mapping[str, object]) -> None:
        """Runs the command with values for its places, and waits for it.

        An exception meanwhile, as at Ctrl-C, kills it with all processes it started, as does the end of this process.
        """
        command = self.fill(values)
        process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=_STDERR, start_new_session=True
        )
        try:
            with closing(CommandGuard(process.pid)):
                status = process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if status:
            raise ChildProcessError(f"the command {mask_text(command)!r} failed with {status_text(status)}")
