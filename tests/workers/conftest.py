"""What holds for all tests of workers."""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.kits.pool_suite")

from tests.kits.workers_kit import time_limit  # noqa: E402


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    """Turns a hang into an error, and ends every worker that a test leaves."""
    with time_limit(180):
        yield
