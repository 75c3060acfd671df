"""The global random generators that augmentations draw from: seeded by an item's place, and kept apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
        self._states = _get_states()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the stream's states in the place of those that are there, and takes them away again."""
        theirs = _get_states()
        _set_states(self._states)
        try:
            yield
        finally:
            self._states = _get_states()
            _set_states(theirs)


_States = tuple[object, object, torch.Tensor]


def _get_states() -> _States:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _set_states(states: _States) -> None:
    own, numpy, torchs = states
    random.setstate(own)  # type: ignore[arg-type]
    np.random.set_state(numpy)  # type: ignore[arg-type]
    torch.default_generator.set_state(torchs)
