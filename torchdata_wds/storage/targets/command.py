"""Shards into the input of a shell command: ``pipe:aws s3 cp - s3://bucket/x.tar``.

The command is started as for reading (see `command`), and only exit status 0 is success: here nobody stops reading
early. What it writes to its standard output is kept with its standard error, for messages.

A command cannot tell the end of a whole shard from that of one whose writer has died. So an unfinished target kills it
before its input is closed: at an abort, at an exception, at the end of the process. A process that is itself killed
cannot do that, and its `CommandGuard` does it in its place.
"""

from __future__ import annotations

import os

from torchdata_wds.errors import ShardOpenError
from torchdata_wds.storage.options import StorageOptions
from torchdata_wds.storage.sources.command import ShellCommand, start_command, status_text
from torchdata_wds.storage.targets.base import ShardTarget

__all__ = ["open_command_target"]


#: How long a command that has closed its input may take to end, before it is killed so that its failure can be told.
GRACE_SECONDS = 5.0


class CommandTarget(ShardTarget):
    """A running command that is written to."""

    def __init__(self, url: str, command: ShellCommand) -> None:
        super().__init__(url)
        self._command = command

    def _write(self, view: memoryview) -> None:
        file = self._command.pipe.fileno()
        try:
            while view:
                count = os.write(file, view)
                self._position += count
                view = view[count:]
        except BrokenPipeError as error:
            raise self._early_end() from error
        except OSError as error:
            raise self._command.report(
                f"cannot be written to at byte {self._position:,}: {error.strerror or error}"
            ) from error

    def _early_end(self) -> ShardOpenError:
        ended = self._command.ends_within(GRACE_SECONDS)
        if not ended:
            self._command.kill()
        status = self._command.wait()
        how = f"ended with {status_text(status)}" if ended else "closed its input and went on"
        return self._command.report(
            f"{how} before it had read the whole shard, of which {self._position:,} bytes were written to it"
        )

    def _commit(self) -> None:
        self._command.dismiss_guard()  # which holds its input open as well
        self._command.pipe.close()
        # What it has left in the background, such as tee >(sha256sum), may still be writing what belongs to the shard.
        status = self._command.wait(spare_rest=True)
        if status:
            raise self._command.report(f"failed with {status_text(status)}: the shard was not stored whole")
        self._command.log_complaints()

    def _release(self, *, owned: bool) -> None:  # noqa: ARG002  (the command knows its owner)
        self._command.close()


def open_command_target(url: str, overwrite: bool, options: StorageOptions) -> CommandTarget:  # noqa: ARG001 - as all
    """Starts a command, to write to it. Whether it replaces what exists is the command's own affair.

    Raises:
        UnsafeDataError: under ``WDS_SECURE=1``.
        ShardOpenError: if the command cannot be started.
    """
    return CommandTarget(url, start_command(url, writing=True))
