"""What holds for all tests."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collection, which tests about open files ask for again and again."""
    gc.collect()
    gc.freeze()
