"""torchdata's forms on all pipes, without importing torchdata before one of them is used."""

from __future__ import annotations

import importlib

from torchdata_wds.pipes.form_names import install

__all__ = ["import_torchdata"]


def import_torchdata() -> None:
    """Imports torchdata, which registers its functional forms.

    Raises:
        ImportError: if it is not there, or cannot be loaded; it says why.
    """
    importlib.import_module("torchdata_wds.workers.service")  # the one file that imports torchdata


install(import_torchdata)
