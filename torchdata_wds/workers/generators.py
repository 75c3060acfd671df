"""The global random generators that augmentations draw from: seeded by an item's place, and kept apart."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
        self._torch = torch.default_generator.get_state()
        self._numpy = _NumpyState(np.random.MT19937(0), b"", None)
        self._numpy_outside: _NumpyState | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Puts the stream's states in the place of those that are there, and takes them away again."""
        own, torchs = random.getstate(), torch.default_generator.get_state()
        numpy = self._numpy_outside = _get_numpy(self._numpy_outside)
        random.setstate(self._own)
        torch.default_generator.set_state(self._torch)
        _set_numpy(self._numpy)
        try:
            yield
        finally:
            self._own, self._torch = random.getstate(), torch.default_generator.get_state()
            self._numpy = _get_numpy(self._numpy)
            random.setstate(own)
            torch.default_generator.set_state(torchs)
            _set_numpy(numpy)


class _NumpyState(NamedTuple):
    """numpy's global generator at a time.

    Attributes:
        bits: Its bit generator, which holds all of its state but a half pair of Gaussian numbers.
        memory: What the bit generator's memory held.
        full: The whole state where such a half waits; None where none does.
    """

    bits: Any
    memory: bytes
    full: Any


#: Bytes of an MT19937: 624 words and a position.
_MEMORY = 4 * 625


def _get_numpy(known: _NumpyState | None) -> _NumpyState:
    """Gives the state; if nothing was drawn since it was known, that one, for numpy takes 100 us to tell."""
    bits = mtrand.get_bit_generator()
    memory = ctypes.string_at(bits.ctypes.state_address, _MEMORY) if type(bits) is np.random.MT19937 else b""
    if known is not None and known.full is None and bits is known.bits and memory and memory == known.memory:
        return known
    full = np.random.get_state(legacy=False)
    return _NumpyState(bits, memory, full if full["has_gauss"] else None)


def _set_numpy(state: _NumpyState) -> None:
    mtrand.set_bit_generator(state.bits)
    if state.full is not None:
        np.random.set_state(state.full)
