"""Runs graphs of DataPipes: the reading service, and the boundary between its workers and the main process."""

from __future__ import annotations

import importlib

from torchdata_wds.pipes.form_names import install


def import_torchdata() -> None:
    """Imports torchdata, which registers its functional forms; an ImportError says why it cannot be loaded."""
    importlib.import_module("torchdata_wds.workers.service")  # the one file that imports torchdata


install(import_torchdata)  # torchdata's forms work on all pipes; the first use of one imports torchdata
