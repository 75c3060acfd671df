"""The ways in which an archive is read, by the sizes of the windows."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchdata_wds.format.tar import fast as lookahead

Sizes = tuple[int, int, int]
"""The smallest and the largest window in bytes, and how many members make it look at all of them together."""

READERS: dict[str, Sizes] = {
    "one by one": (0, 0, 0),
    "small windows": (1536, 4096, 0),
    "small windows from header to header": (1536, 4096, 1 << 60),
    "large windows": (1 << 16, 1 << 21, 0),
    "large windows from header to header": (1 << 16, 1 << 21, 1 << 60),
}

DEFAULT_READERS = ("one by one", "small windows from header to header")
"""Those that whole modules of tests run with by default."""


@contextmanager
def reading_with(sizes: Sizes) -> Iterator[None]:
    """Reads archives in windows of these sizes, from the first member on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookahead, "SMALLEST_WINDOW", sizes[0])
        patch.setattr(lookahead, "LARGEST_WINDOW", sizes[1])
        patch.setattr(lookahead, "MANY_MEMBERS", sizes[2])
        patch.setattr(lookahead, "FIRST_MEMBERS", 0)
        yield
