"""Reads the fields of many tar headers at once, eight bytes of each in one step.

A column holds eight bytes of each header as a little-endian word, so that the first byte is the lowest.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_SIZE, _SUM = 15, 18  # the words in whose second halves these fields begin
_BITS = [np.uint64(bits) for bits in range(64)]


def _repeated(byte: int) -> np.uint64:
    return np.uint64(byte * 0x0101010101010101)


_ZEROS, _NO_DIGIT = _repeated(ord("0")), _repeated(0xF8)
_FOUR, _SIX, _SEVEN = (np.uint64((1 << 8 * number) - 1) for number in (4, 6, 7))  # the first bytes of a word
_BYTE, _ZERO = np.uint64(0xFF), np.uint64(ord("0"))
_EVEN, _LOW_HALF = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
# What must be 0 once the zeros of the digits are taken away. After the digits, a blank is as good as a NUL.
_SIZE_ZEROS, _SUM_ZEROS = _ZEROS & _SEVEN, _ZEROS & _SIX
_HIGH_WRONG, _LOW_WRONG = _NO_DIGIT & ~_FOUR, (_NO_DIGIT & _SEVEN) | np.uint64(0xDF << 56)
_SUM_WRONG = (_NO_DIGIT & _SIX) | np.uint64(0xDFDF << 48)
_BLANKS = np.uint64(8 * ord(" "))
# Neighbours become one number: of two digits, of four, of eight. How far the first moves up, and the second down.
_JOINS = [
    (_BITS[3], _BITS[8], np.uint64(0x003F003F003F003F)),
    (_BITS[6], _BITS[16], np.uint64(0x00000FFF00000FFF)),
    (_BITS[12], _BITS[32], np.uint64(0xFFFFFF)),
]


def _octal(digits: Array) -> Array:
    """Returns the numbers of eight octal digits each, given as bytes of 0 to 7."""
    for up, down, mask in _JOINS:
        digits = ((digits << up) + (digits >> down)) & mask
    return digits


def sizes_of(heads: Array, used: Array) -> tuple[Array, Array]:
    """Reads the sizes in headers: eleven octal digits, and a NUL or blank; also returns which headers are sound.

    A sound one has such a size and a right checksum: six octal digits and two NULs or blanks, or a zero, six digits and
    one of these, as Rust's tar crate writes it; the first header tells which.

    Args:
        heads: The headers, an array of shape (number, 64) and dtype ``<u8``.
        used: The bits that are set in any of them, an array of 64 words.

    Returns:
        The sizes in bytes, int64, and an array of bool.
    """
    high, low = heads[:, _SIZE] ^ _ZEROS, heads[:, _SIZE + 1] ^ _SIZE_ZEROS
    field = heads[:, _SUM] >> _BITS[32] | heads[:, _SUM + 1] << _BITS[32]
    has_seven = int(field[0]) >> 48 & 0xFF >= ord("0")
    stored = (field >> _BITS[8] if has_seven else field) ^ _SUM_ZEROS
    is_sound: Array = (high & _HIGH_WRONG | low & _LOW_WRONG | stored & _SUM_WRONG) == 0
    if has_seven:
        is_sound &= field & _BYTE == _ZERO
    numbers = _octal(np.stack((high >> _BITS[32], low & _SEVEN, stored & _SIX)))
    is_sound &= numbers[2] >> _BITS[6] == _byte_sums(heads, used, field)
    sizes = numbers[0] << _BITS[9] | numbers[1] >> _BITS[3]
    return sizes.astype(np.int64), is_sound


def _byte_sums(heads: Array, used: Array, field: Array) -> Array:
    """Sums the bytes of each header; the eight of the checksum's field count as blanks."""
    lanes: Array = np.add.reduce(_byte_pairs(heads.T[used.nonzero()[0]]), axis=0)
    lanes -= _byte_pairs(field)  # no lane of a sound header borrows: its magic and sizes add more than two digits
    pairs = (lanes & _LOW_HALF) + (lanes >> _BITS[16] & _LOW_HALF)
    sums: Array = (pairs & _FOUR) + (pairs >> _BITS[32]) + _BLANKS
    return sums


def _byte_pairs(words: Array) -> Array:
    """Returns sums of two bytes of each word, in four lanes of 16 bits."""
    lanes = words >> _BITS[8]
    lanes &= _EVEN
    lanes += words & _EVEN
    return lanes
