"""Shards written to the input of a shell command: ``pipe:aws s3 cp - s3://bucket/x.tar``.

The command is started as for reading (see `sources.command`), but only exit status 0 is success: a command that stops
reading early has not stored the shard. Its standard output goes with its standard error, for messages.

A command cannot distinguish the end of a complete shard from the death of its writer. So an unfinished target kills it
before its input is closed: at an abort, an exception or the end of the process. If the process itself is killed, the
`CommandGuard` does so.
"""

import os

from torchdata_wds.storage.places import Place
from torchdata_wds.storage.sources.command import ShellCommand, start_command, status_text
from torchdata_wds.storage.targets.base import Target

#: Seconds that a command has to end after it has closed its input; then it is killed, to report its failure.
GRACE_SECONDS = 5.0


class CommandTarget(Target):
    """A running command that receives a shard."""

    def __init__(self, url: str, command: ShellCommand) -> None:
        super().__init__(url)
        self._command = command

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._command.pipe.fileno(), view)
        except BrokenPipeError as error:
            ended = self._command.ends_within(GRACE_SECONDS)
            if not ended:
                self._command.kill()
            status = self._command.wait()
            how = f"ended with {status_text(status)}" if ended else "closed its input and went on"
            rest = f"before it had read the whole shard; {self._position:,} bytes were written to it"
            raise self._command.report(f"{how} {rest}") from error
        except OSError as error:
            reason = f"cannot be written to at byte {self._position:,}: {error.strerror or error}"
            raise self._command.report(reason) from error

    def _commit(self) -> None:
        self._command.dismiss_guard()  # it keeps the command's input open too
        self._command.pipe.close()
        # A background process of the command, as in tee >(sha256sum), may still be writing something for the shard.
        status = self._command.wait(spare_rest=True)
        if status:
            raise self._command.report(f"failed with {status_text(status)}: the shard was not stored whole")
        self._command.log_complaints()

    def _release(self, *, owned: bool) -> None:  # noqa: ARG002  (the command knows its owner)
        self._command.close()


def open_command_target(place: Place, overwrite: bool) -> CommandTarget:  # noqa: ARG001 - the command decides
    """Starts a command as `start_command` does, to write a shard to it."""
    return CommandTarget(place.url, start_command(place, writing=True))
