"""Packages that are imported when the first field needs them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["MissingPackageError", "import_optional"]


class MissingPackageError(ModuleNotFoundError):
    """A field needs a package that is not installed: no sample can work, so it is never a ``DecodingError``."""


def import_optional(module: str, *, extra: str, fields: str) -> Any:
    """Imports an optional package, or says which extra brings it.

    Args:
        module: The module to import.
        extra: The extra of this package that installs it.
        fields: What needs it, in words for the message.

    Raises:
        MissingPackageError: an ImportError, if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as cause:
        raise MissingPackageError(
            f"{fields} need the {module} package, which is not installed: pip install 'torchdata_wds[{extra}]'",
            name=module,
        ) from cause
