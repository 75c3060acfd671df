"""The global random generators that augmentations draw from: seeded by an item's place, and kept apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand

__all__ = ["OwnGenerators", "seed_generators"]


def seed_generators(*place: int | str) -> None:
    """Seeds the generators of ``random``, ``numpy`` and ``torch`` (on the CPU) with what depends on every argument.

    It costs some 15 us; ``torch.manual_seed`` alone costs twenty times as much, since it looks for other devices.
    """
    digest = hashlib.blake2b(repr(place).encode(), digest_size=20).digest()
    random.seed(int.from_bytes(digest[:8], "little"))
    np.random.seed(int.from_bytes(digest[8:12], "little"))
    torch.default_generator.manual_seed(int.from_bytes(digest[12:], "little"))


class OwnGenerators:
    """States of the global generators for one stream: what it draws moves nobody else's, nor the other way round."""

    def __init__(self) -> None:
        self._own = random.getstate()
        self._numpy = np.random.MT19937(0)
        self._torch = torch.default_generator.get_state()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the stream's states in the place of those that are there, and takes them away again."""
        own, torchs = random.getstate(), torch.default_generator.get_state()
        numpy = mtrand.get_bit_generator()  # numpy takes 30 times as long to give and take a state
        random.setstate(self._own)
        mtrand.set_bit_generator(self._numpy)
        torch.default_generator.set_state(self._torch)
        try:
            yield
        finally:
            self._own, self._torch = random.getstate(), torch.default_generator.get_state()
            random.setstate(own)
            mtrand.set_bit_generator(numpy)
            torch.default_generator.set_state(torchs)
