"""Archives as we, GNU tar and Python's tarfile read them: equal, or different as docs/tar-differences.md says."""

import logging
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.kits import tar_kinds
from tests.kits.readers import READERS, reading_with
from tests.kits.tar_readers import agree, gnu_tar_is_here, read_here, read_with_gnu_tar, read_with_tarfile
from torchdata_wds.cli.validate.findings import Finding
from torchdata_wds.cli.validate.shard_validation import ShardValidation

TABLE = resources.files("torchdata_wds").joinpath("docs/tar-differences.md").read_text()
COLUMNS = ["row", "the archive has", "here", "GNU tar", "Python's tarfile", "why"]
HAS_GNU_TAR = gnu_tar_is_here()
PROGRAMS = pytest.mark.parametrize(
    "program",
    [
        pytest.param("GNU tar", marks=pytest.mark.skipif(not HAS_GNU_TAR, reason="GNU tar is not installed")),
        "Python's tarfile",
    ],
)
# What only some versions of a program read differently.
VARYING = {"size-before-long-name", "slash-of-the-short-name"}


class Case(NamedTuple):
    """An archive to compare.

    Attributes:
        row: The row of the table that it belongs to, None where all programs agree.
        seed: What it was drawn from.
        archive: Its bytes.
    """

    row: str | None
    seed: str
    archive: bytes


def table_rows() -> Iterator[dict[str, str]]:
    """The rows of the table in the docs."""
    lines = [line for line in TABLE.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == COLUMNS
    for line in lines[2:]:
        yield dict(zip(COLUMNS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))


def declared(program: str) -> set[str]:
    """The rows of archives that a program reads differently, by the table."""
    return {row["row"] for row in table_rows() if row[program] != "as here"}


def hand_made(row: str | None, count: int) -> list[Case]:
    """Archives of a row, by their seeds."""
    seeds = [f"{row} {number}" for number in range(count)]
    return [Case(row, seed, tar_kinds.hand_made(Random(seed), row)) for seed in seeds]


def compare(cases: Sequence[Case], folder: Path, program: str) -> tuple[set[str], list[str]]:
    """Reads archives here and with another program; in the run for tarfile, with each of our readers too.

    Returns:
        The rows in which the program differs, and what is wrong: differences that the table does not have, readers of
        ours that differ, and differences that validation does not report.
    """
    archives = [case.archive for case in cases]
    readings = read_with_gnu_tar(archives, folder) if program == "GNU tar" else map(read_with_tarfile, archives)
    allowed = declared(program)
    differing, wrong = set(), []
    for case, reading in zip(cases, readings, strict=True):
        here = read_here(case.archive)
        for name, sizes in READERS.items() if program == "Python's tarfile" else ():
            with reading_with(sizes):
                if read_here(case.archive) != here:
                    wrong.append(f"{case.seed}: reading {name} differs")
        if agree(here, reading):
            continue
        differing.add(str(case.row))
        if case.row not in allowed:
            wrong.append(f"{case.seed}: {program} differs")
        if not is_reported(case.archive, folder):
            wrong.append(f"{case.seed}: validation says nothing")
    return differing, wrong


def is_reported(archive: bytes, folder: Path) -> bool:
    """Whether ``wds validate --strict`` fails for an archive."""
    path = folder / "validated.tar"
    path.write_bytes(archive)
    found = [item for item in ShardValidation(str(path)) if isinstance(item, Finding)]
    return any(finding.level != "note" for finding in found)


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of odd archives have much to warn about."""
    caplog.set_level(logging.ERROR, "torchdata_wds")


def test_table_has_the_rows_of_all_archives_that_are_drawn() -> None:
    """A row in the docs has archives in this test, and archives that differ have a row."""
    assert [row["row"] for row in table_rows()] == list(tar_kinds.DIFFERENT)
    assert all(row[name] for row in table_rows() for name in COLUMNS)


@PROGRAMS
def test_readers_agree_or_differ_as_the_table_says(program: str, tmp_path: Path) -> None:
    """A few archives of each row, and some that all programs read alike; each row differs in one at least."""
    expected = declared(program)
    cases = [case for row in tar_kinds.DIFFERENT for case in hand_made(row, 8 if row in expected else 2)]
    cases += hand_made(None, 15)
    cases += [Case(None, f"tarfile {seed}", tar_kinds.by_tarfile(Random(seed))) for seed in range(5)]
    differing, wrong = compare(cases, tmp_path, program)
    assert not wrong
    assert expected - VARYING <= differing <= expected


@pytest.mark.slow
@PROGRAMS
def test_readers_agree_or_differ_as_the_table_says_in_a_long_campaign(program: str, tmp_path: Path) -> None:
    """More than 700 archives: made by hand, by tarfile in its three formats, and by GNU tar in its five."""
    cases = [case for row in tar_kinds.DIFFERENT for case in hand_made(row, 16)] + hand_made(None, 200)
    cases += [Case(None, f"tarfile {seed}", tar_kinds.by_tarfile(Random(seed))) for seed in range(170)]
    if HAS_GNU_TAR:
        for seed in range(40):
            archive = tar_kinds.by_gnu_tar(Random(seed), tmp_path / f"tree-{seed}")
            row = "sparse-names" if b"GNU.sparse.name" in archive else None
            cases.append(Case(row, f"GNU tar {seed}", archive))
        for form in ("gnu", "posix"):
            first, second = tar_kinds.volumes(tmp_path / form, form)
            cases += [Case("damage", f"first {form}", first), Case("parts-of-volumes", f"second {form}", second)]
    assert len(cases) >= 700
    (tmp_path / "archives").mkdir()
    differing, wrong = compare(cases, tmp_path / "archives", program)
    assert not wrong
    assert declared(program) - VARYING <= differing <= declared(program)
