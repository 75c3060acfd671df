"""A process that kills commands when the process that started them dies, however that happens."""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref
from collections.abc import Collection

# The lines just end when the process dies. A group noted as ended is left alone: its number may be another's by then.
_GUARDING = """
groups=$*
while read -r sign group; do
    if [ "$sign" = + ]; then
        groups="$groups $group"
    else
        rest=
        for other in $groups; do [ "$other" = "$group" ] || rest="$rest $other"; done
        groups=$rest
    fi
done
for group in $groups; do kill -s KILL -- "-$group"; done
"""

_open: weakref.WeakSet[CommandGuard] = weakref.WeakSet()


class CommandGuard:
    """Kills the groups of running commands when this process dies: nothing else could, if it is killed itself.

    It belongs to the process that made it; a forked child's copy does nothing. The descriptors in `holding` stay open
    until the commands are killed.
    """

    def __init__(self, *groups: int, holding: Collection[int] = ()) -> None:
        reading, self._line = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDING, "sh", *map(str, groups)],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=holding,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._line)
            raise
        finally:
            os.close(reading)
        _open.add(self)

    def add(self, group: int) -> None:
        """Notes a command that has begun."""
        self._write(f"+ {group}\n")

    def remove(self, group: int) -> None:
        """Notes that a command has ended, or may outlive this process."""
        self._write(f"- {group}\n")

    def close(self) -> None:
        """Ends the guard, whose commands have ended."""
        if self._line >= 0:
            # Not by the end of its line: it would kill groups that may be others' by now.
            self._process.kill()
            self._process.wait()
            self._close_line()

    def _write(self, line: str) -> None:
        if self._line >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guard itself was killed
                os.write(self._line, line.encode())

    def _close_line(self) -> None:
        line, self._line = self._line, -1
        os.close(line)


def _forget_all() -> None:
    # An open copy of a line would keep the guard from seeing that its process has died.
    for guard in list(_open):
        if guard._line >= 0:
            guard._process.returncode = 0
            guard._close_line()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
