"""Hides an installed torchdata; see `tests.kits.torchdata`."""

raise ModuleNotFoundError("No module named 'torchdata'", name="torchdata")
