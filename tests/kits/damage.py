"""Every way in which a shard can be damaged, with the samples that are complete before it."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from typing import NamedTuple

import zstandard

from tests.kits.shards import sample_members, tar_bytes

KEYS = ["a", "b", "c"]
MEMBERS = [member for key in KEYS for member in sample_members(key, txt=key.encode() * 600, cls=b"1")]
GOOD = tar_bytes(MEMBERS)
# a txt member takes 512 + 1024 bytes, a cls member 512 + 512, a sample so 2,560
SAMPLE = 2560
B_CLS = SAMPLE + 1536
"""Where the header of b.cls lies."""


class Damage(NamedTuple):
    """One damaged shard.

    Attributes:
        data: Its bytes.
        complete: The keys of the samples that lie complete before the damage.
        says: What the error's text must hold, the byte offset among it.
    """

    data: bytes
    complete: list[str]
    says: str


def _broken_byte(data: bytes, place: int) -> bytes:
    """The data with one byte changed; a negative place counts from the end."""
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


def _compressed_cut(compress: Callable[[bytes], bytes]) -> bytes:
    data = compress(GOOD)
    return data[: len(data) - 5]


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


END_OF_MEMBERS = len(GOOD) - 1024

DAMAGES = {
    "bad checksum of the first header": Damage(_broken_byte(GOOD, 3), [], "byte 0"),
    "bad checksum inside a sample": Damage(_broken_byte(GOOD, B_CLS + 3), ["a"], f"byte {B_CLS:,}"),
    "bad checksum at a new sample": Damage(_broken_byte(GOOD, 2 * SAMPLE + 3), ["a"], f"byte {2 * SAMPLE:,}"),
    "cut inside the first header": Damage(GOOD[:100], [], "byte 100"),
    "cut inside a header": Damage(GOOD[: B_CLS + 100], ["a"], f"byte {B_CLS + 100:,}"),
    "cut inside a member": Damage(GOOD[: SAMPLE + 700], ["a"], f"byte {SAMPLE + 700:,}"),
    "cut inside padding": Damage(GOOD[: SAMPLE + 512 + 601], ["a"], f"byte {SAMPLE + 1113:,}"),
    "cut between members of a sample": Damage(GOOD[:B_CLS], ["a"], f"byte {B_CLS:,}"),
    "cut between two samples": Damage(GOOD[: 2 * SAMPLE], ["a"], f"byte {2 * SAMPLE:,}"),
    "no end marker": Damage(GOOD[:END_OF_MEMBERS], ["a", "b"], f"byte {END_OF_MEMBERS:,}"),
    "half a zero block": Damage(GOOD[: END_OF_MEMBERS + 300], ["a", "b"], f"byte {END_OF_MEMBERS + 300:,}"),
    "a zero-byte file": Damage(b"", [], "byte 0"),
    "text that is no tar": Damage(b"<html><body>404 Not Found</body></html>\n" * 40, [], "<html><body>404"),
    "short text that is no tar": Damage(b"Access denied", [], "Access denied"),
    "bytes behind the end marker": Damage(GOOD + b"x" * 512, KEYS, f"byte {len(GOOD):,}"),
    "a second archive behind the end marker": Damage(GOOD + GOOD, KEYS, f"byte {len(GOOD):,}"),
    "a cut gzip stream": Damage(_compressed_cut(gzip.compress), KEYS, "byte"),
    "a gzip stream with a wrong checksum": Damage(_broken_byte(gzip.compress(GOOD), -6), KEYS, "byte"),
    "a cut bz2 stream": Damage(_compressed_cut(bz2.compress), KEYS, "byte"),
    "a cut xz stream": Damage(_compressed_cut(lzma.compress), KEYS, "byte"),
    "a cut zstd stream": Damage(_compressed_cut(_zstd), [], "byte"),
    "a zstd stream with a wrong checksum": Damage(_broken_byte(_zstd(GOOD), -2), KEYS, "byte"),
}
