"""What holds for the tests of ranges."""

from tests.storage.sources.conftest import _alone  # noqa: F401  no pauses, no proxies, no connection of another test
