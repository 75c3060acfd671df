"""Memory for what is read and decoded: blocks that come and go thousands of times a second."""

from __future__ import annotations

_LARGEST = 31 << 20  # glibc learns from blocks of up to 32 MiB, its own header included
_is_kept = False


def keep_memory() -> None:
    """Lets malloc keep freed memory for the next block instead of giving it back to the system; once a process.

    The system clears every page that it hands out, which takes longer than filling it. glibc keeps blocks of the size
    of the largest mapped one that was freed, and twice that at the end of the heap (mallopt(3), ``M_MMAP_THRESHOLD``),
    unless its limits were set by environment variables. Other allocators take no notice.
    """
    global _is_kept
    if not _is_kept:
        _is_kept = True
        bytes(_LARGEST)  # never written to, so that it takes no memory itself
