"""Runs graphs of DataPipes: the reading service, and the boundary between its workers and the main process."""

from __future__ import annotations

import importlib


def import_torchdata() -> None:
    """Imports torchdata, which registers its functional forms; an ImportError says why it cannot be loaded."""
    importlib.import_module("torchdata_wds.workers.service")  # the one file that imports torchdata
