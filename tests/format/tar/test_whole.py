"""Whether an archive is whole, without reading what is in it."""

import gzip
import io
import tarfile

import pytest

from tests.kits.damage import GOOD
from tests.kits.shards import tar_bytes
from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.headers import begins_a_tar
from torchdata_wds.format.tar import check_whole


def written(tar_format: int, *, links: bool = True) -> bytes:
    """An archive with everything that has a header of its own."""
    out = io.BytesIO()
    options = {"pax_headers": {"comment": "x" * 600}} if tar_format == tarfile.PAX_FORMAT else {}
    with tarfile.open(fileobj=out, mode="w", format=tar_format, **options) as tar:  # type: ignore[call-overload]
        for number, size in enumerate([0, 1, 511, 512, 513, 700_000, 3]):
            name = f"{number}.bin" if tar_format == tarfile.USTAR_FORMAT else "n" * 150 + f"{number}.bin"
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(bytes(size)))
            for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE):
                other = tarfile.TarInfo(f"{number}.{kind.decode()}")
                other.type, other.linkname = kind, name[:90]
                tar.addfile(other)
    return out.getvalue()


ARCHIVES = {
    "ustar": written(tarfile.USTAR_FORMAT),
    "gnu": written(tarfile.GNU_FORMAT),
    "pax": written(tarfile.PAX_FORMAT),
    "empty": bytes(1024),
    "joined": GOOD + GOOD,
    "many": tar_bytes((f"{number}.txt", b"x" * (number % 700)) for number in range(2000)),
}


class OnlyForward(io.BufferedReader):
    """A stream that cannot seek, as that of a compressed shard."""

    def seekable(self) -> bool:
        return False


@pytest.mark.parametrize("name", ARCHIVES)
def test_check_whole_takes_every_archive_that_is_whole(name: str) -> None:
    """With or without seeking."""
    check_whole(io.BytesIO(ARCHIVES[name]), "x.tar")
    check_whole(OnlyForward(io.BytesIO(ARCHIVES[name])), "x.tar")  # type: ignore[arg-type]
    with gzip.open(io.BytesIO(gzip.compress(ARCHIVES[name], 1))) as stream:
        check_whole(stream, "x.tar")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["ustar", "gnu", "pax", "joined", "many"])
def test_check_whole_raises_when_an_archive_is_cut(name: str) -> None:
    """In headers, in payloads and between members; payloads of zeros are no end marker."""
    data = ARCHIVES[name].rstrip(b"\0")
    steps = range(0, len(data), max(512, len(data) // 25 // 512 * 512))
    for size in (*steps, *(step + 300 for step in steps), len(data)):
        cut = data[:size]
        if name == "joined" and size >= len(GOOD) - 1024 and not cut[len(GOOD.rstrip(b"\0")) :].strip(b"\0"):
            continue  # the first archive is whole
        for stream in (io.BytesIO(cut), OnlyForward(io.BytesIO(cut))):  # type: ignore[arg-type]
            with pytest.raises(ShardFormatError, match=r"x\.tar"):
                check_whole(stream, "x.tar")


def test_check_whole_raises_when_bytes_are_damaged_or_no_archive() -> None:
    """A header that is none, and what follows the end."""
    special = tarfile.TarInfo("a")
    special.type = tarfile.DIRTYPE
    folder = special.tobuf(tarfile.USTAR_FORMAT)
    for data in (b"", b"x", b"<html>" * 1000, GOOD + b"x" * 512, folder[:100] + b"9" + folder[101:] + bytes(1024)):
        with pytest.raises(ShardFormatError):
            check_whole(io.BytesIO(data), "x.tar")


def test_begins_a_tar_looks_at_the_first_block() -> None:
    """Headers of all formats, and an end marker."""
    assert all(begins_a_tar(data[:512]) for data in ARCHIVES.values())
    assert not any(map(begins_a_tar, [b"", GOOD[:511], b"x" * 512, b"\x81" + bytes(511)]))
