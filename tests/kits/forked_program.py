"""The program in a forked child: a process of its own to send signals to, without importing torch again."""

import os
import signal
import sys
from typing import NoReturn

from torchdata_wds.cli.main import main

__all__ = ["ForkedProgram"]


class ForkedProgram:
    """A run of the program, in a session of its own. What only an interpreter that has just started does is left out.

    Attributes:
        pid: Its process, which is also its process group.
    """

    def __init__(self, *arguments: object) -> None:
        self._output, output = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            self._run([str(argument) for argument in arguments], output)
        os.close(output)

    def _run(self, arguments: list[str], output: int) -> NoReturn:
        code = 1
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(output, number)
            os.close(output)
            os.close(self._output)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115 - for good
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = main(arguments)
            sys.stdout.flush()
        finally:
            os._exit(code)

    def wait(self) -> tuple[int, bytes]:
        """Returns its exit code, negative for a signal, and what it has written, which must not be more than 64 kB."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.set_blocking(self._output, False)  # a command that outlives the program has its output open
        with os.fdopen(self._output, "rb", buffering=0) as output:
            return code, output.read() or b""
