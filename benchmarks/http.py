"""Reading from a web server: against curl, and with the latency hidden by reading ahead. See web.py.

    python benchmarks/http.py [--quick] [--kind KIND ...] [--json FILE] [--chart FILE]

This file has the name of a module of the standard library, which every script in this folder would find in its place:
imported, it steps aside.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def _step_aside() -> None:
    """Puts the standard library's module where this one was about to be."""
    here = Path(__file__).resolve().parent
    spec = importlib.machinery.PathFinder.find_spec(
        "http", [folder for folder in sys.path if Path(folder).resolve() != here]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["http"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    from web import main

    main()
else:
    _step_aside()
