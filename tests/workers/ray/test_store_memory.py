"""Messages of the object store can be written, without a copy where the store's memory allows it."""

import mmap
import tempfile

import numpy as np
import pytest
import torch

from torchdata_wds.workers.ray.store_memory import writable


@pytest.mark.parametrize("access", [mmap.ACCESS_WRITE, mmap.ACCESS_READ])
def test_memory_is_copied_only_if_it_cannot_be_written(access: int) -> None:
    """A tensor over it neither warns nor crashes when it is written to."""
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        memory = mmap.mmap(file.fileno(), 1 << 16, access=access)
        found = writable(memoryview(memory).toreadonly()[100:200])
        torch.frombuffer(found, dtype=torch.uint8).fill_(7)
        is_shared = np.frombuffer(memory, np.uint8)[150] == 7
        assert is_shared == (access == mmap.ACCESS_WRITE)
        assert bytes(found) == b"\x07" * 100


def test_empty_memory_is_copied() -> None:
    """There is nothing to share."""
    assert bytes(writable(b"")) == b""
