"""Our tar reader equals the standard library's on whatever that one writes."""

import io
import tarfile

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from torchdata_wds.errors import ShardFormatError
from torchdata_wds.format.tar import read_members

pytestmark = pytest.mark.usefixtures("each_reader")

NAMES = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0/"), min_size=1, max_size=120
).filter(lambda name: name not in (".", ".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
SIZES = st.sampled_from([0, 1, 511, 512, 513, 1024, 4000]) | st.integers(0, 3000)
KINDS = st.sampled_from(["file"] * 6 + ["hard link", "symbolic link", "folder", "contiguous"])
# tarfile goes round in circles where a link has the name of its target
ENTRIES = st.lists(
    st.tuples(PATHS, KINDS, SIZES, st.integers(0, 255)), max_size=8, unique_by=lambda entry: entry[0].strip("/")
)
FORMATS = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def build(entries: list[tuple[str, str, int, int]], tar_format: int) -> bytes | None:
    """An archive by tarfile; None where the format cannot hold a name."""
    out = io.BytesIO()
    names: list[str] = []
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name, kind, size, fill in entries:
            info = tarfile.TarInfo(name)
            if kind in ("hard link", "symbolic link"):
                if not names:
                    continue
                info.type = tarfile.LNKTYPE if kind == "hard link" else tarfile.SYMTYPE
                info.linkname = names[fill % len(names)]
            elif kind == "folder":
                info.type = tarfile.DIRTYPE
            else:
                info.type = tarfile.REGTYPE if kind == "file" else tarfile.CONTTYPE
                info.size = size
                names.append(name)
            try:
                tar.addfile(info, io.BytesIO(bytes([fill]) * info.size) if info.size else None)
            except ValueError:  # a name too long for ustar
                return None
    return out.getvalue()


def expected(archive: bytes) -> list[tuple[str, bytes]]:
    """What tarfile reads."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        found = []
        for info in tar:
            if info.isreg() or info.islnk():
                file = tar.extractfile(info)
                assert file is not None
                name = info.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
                found.append((name, file.read()))
        return found


def ours(archive: bytes) -> list[tuple[str, bytes]]:
    """What our reader reads."""
    members = read_members(io.BytesIO(archive), "x.tar", reopen=lambda offset: io.BytesIO(archive[offset:]))
    return [(member.name, member.data) for member in members]


@given(ENTRIES, FORMATS)
@settings(max_examples=100, deadline=None)
def test_read_members_equals_tarfile_when_tarfile_wrote_the_archive(
    entries: list[tuple[str, str, int, int]], tar_format: int
) -> None:
    """Names, bytes and order are tarfile's, in ustar, GNU and PAX format."""
    archive = build(entries, tar_format)
    if archive is not None:
        assert ours(archive) == expected(archive)


@given(ENTRIES, FORMATS, st.data())
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_read_members_never_loses_members_when_an_archive_is_cut(
    entries: list[tuple[str, str, int, int]], tar_format: int, data: st.DataObject
) -> None:
    """Cut anywhere, an archive is an error or read in full."""
    archive = build(entries, tar_format)
    assume(archive is not None)
    cut = data.draw(st.integers(0, len(archive)))
    try:
        assert ours(archive[:cut]) == expected(archive)
    except ShardFormatError as error:
        assert "byte" in str(error)


@given(st.binary(max_size=2000))
@settings(max_examples=100, deadline=None)
def test_read_members_never_fails_otherwise_when_given_any_bytes(data: bytes) -> None:
    """Arbitrary bytes give a ShardFormatError and nothing else."""
    try:
        assert ours(data) == []
        assert data
        assert not any(data)
    except ShardFormatError as error:
        assert error.shard == "x.tar"
