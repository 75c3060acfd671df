"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.readers import READERS, reading_with


def pytest_collection_finish() -> None:
    """Leaves what was imported out of garbage collection, which tests about open files ask for again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(
    scope="module",
    params=["one by one", "small windows", pytest.param("large windows", marks=pytest.mark.slow)],
)
def each_reader(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests with every way in which an archive is read; the rest of the suite has large windows."""
    with reading_with(READERS[request.param]):
        yield
