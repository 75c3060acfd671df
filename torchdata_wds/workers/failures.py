"""An exception's way from a worker to the main process, its type and attributes kept."""

from __future__ import annotations

import pickle
import traceback
from typing import NoReturn

from torchdata_wds.handlers import with_notes

__all__ = ["Failure", "RemoteTraceback"]


class RemoteTraceback(Exception):  # noqa: N818  # the name that concurrent.futures and multiprocessing use
    """The text of a traceback from a worker process: the cause of the exception that came from there."""

    def __str__(self) -> str:
        return str(self.args[0])


class Failure:
    """An exception as a worker sends it, in the place of an item.

    Args:
        error: The exception.
        where: The process it was raised in.
    """

    __slots__ = ("pickled", "summary", "text")

    def __init__(self, error: BaseException, where: str) -> None:
        self.text = f'\n"""\nIn {where}:\n{"".join(traceback.format_exception(error))}"""'
        self.summary = f"{type(error).__qualname__} in {where}: {with_notes(error)}"
        self.pickled = _pickled(error)

    def reraise(self) -> NoReturn:
        """Raises the exception, or a RuntimeError that quotes it if it cannot be rebuilt here."""
        error = _rebuilt(self.pickled)
        raise error or RuntimeError(self.summary) from RemoteTraceback(self.text)


def _pickled(error: BaseException) -> bytes | None:
    # An exception whose constructor wants more than its args pickles well and fails to come back: its parts do.
    for form in (error, (type(error), error.args, vars(error))):
        try:
            data = pickle.dumps(form)
        except Exception:  # noqa: BLE001  # attributes of any kind may refuse
            continue
        if _rebuilt(data) is not None:
            return data
    return None


def _rebuilt(data: bytes | None) -> BaseException | None:
    try:
        error = None if data is None else pickle.loads(data)
        if isinstance(error, tuple):
            kind, arguments, attributes = error
            error = kind.__new__(kind, *arguments)
            error.args = arguments
            vars(error).update(attributes)
    except Exception:  # noqa: BLE001  # runs the exception's own constructor
        return None
    return error if isinstance(error, BaseException) else None
