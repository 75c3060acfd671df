"""Makes torchdata's functional forms available on all pipes; torchdata is imported when one is first used."""

from __future__ import annotations

import importlib

from torchdata_wds.pipes.form_names import install


def import_torchdata() -> None:
    """Imports torchdata, which registers its functional forms; an ImportError says why it cannot be loaded."""
    importlib.import_module("torchdata_wds.workers.service")  # the one file that imports torchdata


install(import_torchdata)
