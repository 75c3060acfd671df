"""Headers that other programs read in another way: validation reports each, and nothing of what tars of today write."""

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.kits.shards import tar_bytes
from tests.kits.tar_blocks import END, GNU, V7, block, filled, long_name, member, old_sparse, pax, pax_sparse, record
from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.shard_validation import ShardValidation

A = member(b"a.txt", b"A")
INNER = member(b"inner.txt", b"I")

ODD = {
    "two PAX headers": (pax(("path", "one.txt")) + pax(("path", "two.txt")) + A, "repeated-header"),
    "two long names": (long_name(b"one.txt") + long_name(b"two.txt") + A, "repeated-header"),
    "two long links": (
        long_name(b"one", b"K") + long_name(b"two", b"K") + block(b"l", kind=b"2", link=b"x") + A,
        "repeated-header",
    ),
    "PAX path and long name": (long_name(b"gnu.txt") + pax(("path", "pax.txt")) + A, "two-names"),
    "a path after the name of a sparse member": (pax(("GNU.sparse.name", "b.txt"), ("path", "c.txt")) + A, "two-names"),
    "a record twice": (pax(("size", "2"), ("size", "1")) + A, "repeated-record"),
    "a NUL in a path": (pax(("path", b"a.txt\0b.txt")) + A, "nul-in-name"),
    "an empty path": (pax(("path", "")) + A, "empty-record"),
    "bytes after records": (member(b"x", record("path", "b.txt") + b"\0more", b"x") + A, "bytes-after-records"),
    "bytes after a PAX header": (block(b"x", 16, b"x") + filled(b"16 path=one.txt\nmore") + A, "bytes-after-records"),
    "a size under that of the header": (pax(("size", "0")) + block(b"a.txt", 512), "two-sizes"),
    "a size over that of the header": (pax(("size", "600")) + block(b"a.txt") + INNER, "two-sizes"),
    "a hard link with a size": (A + block(b"b.txt", 600, b"1", link=b"a.txt") + INNER, "sized-link"),
    "a file with a slash": (block(b"d/") + A, "folder-as-file"),
    "a slash in the long name only": (long_name(b"d/") + block(b"d", kind=b"\0") + A, "folder-as-file"),
    "a slash in the short name only": (long_name(b"c.txt") + block(b"d/", 600, b"\0") + INNER, "file-as-folder"),
    "an unknown type": (member(b"a.txt", b"A", b"Z"), "unknown-type"),
    "a prefix in a GNU header": (block(b"a.txt", prefix=b"front", magic=GNU), "prefix"),
    "a prefix in a V7 header": (block(b"a.txt", prefix=b"front", magic=V7), "prefix"),
    "a size with more after it": (block(b"a.txt", size_field=b"0\0" + b"7777777777"), "odd-number"),
    "letters as date": (block(b"a.txt", fields={136: b"yesterday"}), "odd-number"),
    "a checksum with more after it": (block(b"a.txt", checksum=lambda total: b"%05o\0xx" % total), "odd-number"),
    "a global name": (pax(("path", "all.txt"), kind=b"g") + A, "global-header"),
    "a global size": (pax(("size", "1"), kind=b"g") + A, "global-header"),
    "an old sparse map in a ustar header": (
        block(b"a.bin", kind=b"S", fields={386: b"%011o\0%011o\0" % (0, 0)}),
        "sparse-magic",
    ),
    "a sparse map before a GNU header": (
        pax(("GNU.sparse.size", "9"), ("GNU.sparse.map", "9,0")) + block(b"a.bin", magic=GNU),
        "sparse-magic",
    ),
    "sparse pieces that are no blocks": (pax_sparse([(0, 5), (600, 5)], 605, b"0123456789"), "sparse-pieces"),
    "such pieces in the content": (pax_sparse([(0, 5), (600, 5)], 605, b"0123456789", "1.0"), "sparse-pieces"),
    "such pieces in an old header": (old_sparse([(0, 5), (600, 5)], 605, b"0123456789"), "sparse-pieces"),
    "a sparse map that ends early": (pax_sparse([(0, 10)], 605, b"0123456789"), "sparse-end"),
    "a sparse map without pieces": (old_sparse([], 605, b""), "sparse-end"),
    "content after a link": (block(b"l", 600, b"2", link=b"a.txt") + INNER, "ambiguous"),
    "content of a folder": (block(b"d/", 600) + INNER, "ambiguous"),
}


def findings_of(archive: bytes, folder: Path) -> list[Finding]:
    """What validation finds in an archive."""
    path = folder / "x.tar"
    path.write_bytes(archive)
    return [found for found in ShardValidation(str(path)) if isinstance(found, Finding)]


@pytest.mark.parametrize("case", ODD)
def test_validation_reports_a_header_when_other_programs_read_it_differently(case: str, tmp_path: Path) -> None:
    """Each once, with its member and its place, after a member that is all right."""
    archive, kind = ODD[case]
    before = member(b"0.txt", b"0")
    found = [finding for finding in findings_of(before + archive + END, tmp_path) if finding.kind == kind]
    assert [finding.level for finding in found] == ["error" if kind == "ambiguous" else "warning"]
    assert found[0].member


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_validation_finds_nothing_odd_in_what_tarfile_writes(tar_format: int, tmp_path: Path) -> None:
    """Long names, names that are not ASCII, dates with fractions, large numbers and links are nothing odd."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for name in ("a.txt", "d" * 90 + "/" + "n" * 90 + ".txt", "é.txt"):
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.uid = 1, 1.5, 2_000_000
            tar.addfile(info, io.BytesIO(b"A"))
        link = tarfile.TarInfo("z.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "a.txt"
        tar.addfile(link)
    assert findings_of(out.getvalue(), tmp_path) == []


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs GNU tar")
@pytest.mark.parametrize("form", ["v7", "oldgnu", "gnu", "ustar", "pax", "pax --sparse-version=0.0"])
def test_validation_finds_nothing_odd_in_what_gnu_tar_writes(form: str, tmp_path: Path) -> None:
    """Sparse files and folders too, in each of its formats."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"A")
    with (folder / "b.bin").open("wb") as file:
        for place in (100_000, 300_000):
            file.seek(place)
            file.write(b"island")
        file.truncate(500_000)
    sparse = [] if form in ("v7", "ustar") else ["--sparse"]
    subprocess.run(
        ["tar", f"--format={form.split()[0]}", *form.split()[1:], *sparse, "-cf", "../y.tar", "."],
        cwd=folder,
        check=True,
    )
    assert findings_of((tmp_path / "y.tar").read_bytes(), tmp_path) == []


def test_validation_goes_on_after_many_global_headers(tmp_path: Path) -> None:
    """They are no part of the member after them."""
    archive = pax(("comment", "x"), kind=b"g") * 200 + A + filled(b"") + tar_bytes([("b.txt", b"B")])
    assert findings_of(archive, tmp_path) == []
