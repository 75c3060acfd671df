"""What holds for the tests of all sources."""

import os
from collections.abc import Iterator

import pytest

from torchdata_wds.storage import retrying
from torchdata_wds.storage.sources import http_client


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses, no proxies, and no connection of another test."""
    monkeypatch.setattr(retrying, "seconds_to_wait", lambda failures, asked=0.0: 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield
    http_client._pool(None, os.getpid()).clear()
