"""Samples of parts: checked before, read after, and what is missing."""

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.processes import children, open_files
from torchdata_wds.cli.create import kind_of, open_part_list
from torchdata_wds.cli.create.assembling import Missing, SampleAssembler
from torchdata_wds.cli.create.part_lists import Plan, Recipe
from torchdata_wds.errors import SampleError, SpecError

RECIPE = "a.txt text:1\na.bin {}\nb.bin {}\nc.txt text:3\n"


def assemble(text: str, folder: Path, missing: Missing = "error") -> tuple[list[dict[str, Any]], SampleAssembler]:
    """The samples of a recipe without their URL, and what made them."""
    assembler = SampleAssembler(Recipe(text.encode(), "x.txt", str(folder), allow_pipe=True), missing)
    samples = list(assembler)
    for sample in samples:
        del sample["__url__"]
    return samples, assembler


@pytest.mark.parametrize("source", ["gone.bin", "pipe:exit 3", "file-in-zip://x::gone.zip", "memory://gone"])
@pytest.mark.parametrize(
    ("missing", "expected", "counts"),
    [
        ("skip-file", [{"__key__": "a", "txt": b"1"}, {"__key__": "c", "txt": b"3"}], (2, 1)),
        ("skip-sample", [{"__key__": "c", "txt": b"3"}], (2, 2)),
        (
            "empty",
            [{"__key__": "a", "txt": b"1", "bin": b""}, {"__key__": "b", "bin": b""}, {"__key__": "c", "txt": b"3"}],
            (2, 0),
        ),
    ],
)
def test_missing_files_urls_and_commands_are_left_out_when_asked(
    source: str, missing: Missing, expected: list[dict[str, Any]], counts: tuple[int, int], tmp_path: Path
) -> None:
    """With their counts; what is elsewhere shows only when it is read."""
    samples, assembler = assemble(RECIPE.format(source, source), tmp_path, missing)
    assert samples == expected
    assert (assembler.missing_files, assembler.left_out) == counts
    assert assembler.count == 3


def test_missing_file_is_found_before_anything_runs(tmp_path: Path) -> None:
    """Neither by the check, nor for a sample that is left out."""
    text = f"a.txt pipe:touch {tmp_path}/ran\na.bin gone.bin\nb.txt text:\n"
    with pytest.raises(SpecError, match="line 2: there is no file"):
        assemble(text, tmp_path)
    samples, _ = assemble(text, tmp_path, "skip-sample")
    assert [sample["__key__"] for sample in samples] == ["b"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("source", ["pipe:exit 3", "memory://gone"])
def test_source_elsewhere_that_fails_is_an_error_by_default(source: str, tmp_path: Path) -> None:
    """The message has the place, and the command's own."""
    with pytest.raises(SampleError, match=r"^recipe x\.txt, line 2: field 'bin' of sample 'a': "):
        assemble(RECIPE.format(source, "text:"), tmp_path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def shrink(path: Path) -> None:
    path.write_bytes(b"a")


def touch(path: Path) -> None:
    os.utime(path, ns=(0, 5))


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (become_fifo, "was changed after"),
        (grow, r"was changed after .* \(3 bytes then, 4 now\)"),
        (shrink, r"was changed after .* \(3 bytes then, 1 now\)"),
        (touch, "was changed after"),
        (Path.unlink, "cannot be read: No such file"),
    ],
)
@pytest.mark.parametrize("missing", ["error", "skip-sample"])
def test_file_that_changes_after_the_check_is_an_error(
    change: Callable[[Path], None], message: str, missing: Missing, tmp_path: Path
) -> None:
    """Whatever is to be done about files that were missing before."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    assembler = SampleAssembler(Recipe(b"a.txt text:1\nb.bin a.bin\n", "x.txt", str(tmp_path)), missing)
    assembler.check()
    change(path)
    samples = iter(assembler)
    assert next(samples)["txt"] == b"1"
    with pytest.raises(SampleError, match=message):
        next(samples)


@pytest.mark.parametrize("year", [1900, 2400])
def test_file_may_have_any_time(year: int, tmp_path: Path) -> None:
    """Also one whose nanoseconds need more than 63 bits, as a damaged archive leaves them."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"abc")
    os.utime(path, ns=(0, (year - 1970) * 31_556_952 * 10**9))
    samples, _ = assemble("a.bin a.bin\n", tmp_path)
    assert samples == [{"__key__": "a", "bin": b"abc"}]


@pytest.mark.parametrize("given", [b"", b"ab", b"abcd"])
def test_file_that_gives_other_than_its_size_is_an_error(
    given: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in /proc have none, and a damaged disk may give less; what to do is said."""
    (tmp_path / "a.bin").write_bytes(b"abc")
    pieces = [given, b""]
    monkeypatch.setattr(os, "read", lambda *_: pieces.pop(0))
    with pytest.raises(SampleError, match=r"more or fewer bytes than its size, 3; .* 'pipe:cat PATH'"):
        assemble("a.bin a.bin\n", tmp_path)


def test_file_is_read_whole_when_the_system_gives_it_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does beyond 2 GiB."""
    (tmp_path / "a.bin").write_bytes(b"abcdefg")
    read = os.read
    monkeypatch.setattr(os, "read", lambda file, size: read(file, min(size, 3)))
    samples, _ = assemble("a.bin a.bin\n", tmp_path)
    assert samples == [{"__key__": "a", "bin": b"abcdefg"}]


def test_message_is_short_when_the_path_is_no_path(tmp_path: Path) -> None:
    """A text without ``text:``, say."""
    with pytest.raises(SpecError, match="File name too long") as caught:
        assemble(f"a.txt {'x' * 100_000}\n", tmp_path)
    assert len(str(caught.value)) < 1000


def test_compressed_sources_are_kept_as_they_are(tmp_path: Path) -> None:
    """A member .json.gz holds a gzip stream, wherever it comes from."""
    data = gzip.compress(b"{}")
    (tmp_path / "x.json.gz").write_bytes(data)
    samples, _ = assemble(
        f"a.json.gz x.json.gz\na.x.gz pipe:cat {tmp_path}/x.json.gz\na.y.gz filecache::file://{tmp_path}/x.json.gz\n",
        tmp_path,
    )
    assert samples == [{"__key__": "a", "json.gz": data, "x.gz": data, "y.gz": data}]


def test_samples_can_be_made_again(tmp_path: Path) -> None:
    """Iterating twice gives the same; it is checked once."""
    (tmp_path / "a.bin").write_bytes(b"abc")
    assembler = SampleAssembler(Recipe(b"a.bin a.bin\nb.bin text:1\n", "x.txt", str(tmp_path)))
    assert list(assembler) == list(assembler)
    assert assembler.count == 2


def test_no_file_or_process_stays_when_the_reader_stops_early(tmp_path: Path) -> None:
    """Each source is closed before the next is opened."""
    (tmp_path / "a.bin").write_bytes(bytes(100))
    lines = "".join(f"{number}.bin a.bin\n{number}.txt pipe:echo\n" for number in range(50))
    before = open_files()
    samples = iter(SampleAssembler(Recipe(lines.encode(), "x.txt", str(tmp_path), allow_pipe=True)))
    next(samples)
    assert open_files() <= before
    assert not children(unreaped=True)


# ----------------------------------------------------------------------------------------------- what a source is
def test_kind_of_source_goes_by_folder_and_suffix(tmp_path: Path) -> None:
    """A folder is one whatever its name; compression is looked through."""
    (tmp_path / "x.csv").mkdir()
    names = [str(tmp_path / "x.csv"), "x.tsv", "X.CSV.gz", "https://host/x.tsv?a=b.txt", "x.txt", "-", "x"]
    assert [kind_of(name) for name in names] == ["folder", "plan", "plan", "plan", "recipe", "recipe", "recipe"]


def test_part_list_takes_the_delimiter_of_its_suffix(tmp_path: Path) -> None:
    """A comma for CSV; compressed lists are read as such."""
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b'a,b\n"1,2",3\n'))
    (sample,) = SampleAssembler(open_part_list(str(tmp_path / "x.csv.gz")))
    assert (sample["a"], sample["b"]) == (b"1,2", b"3")
    (tmp_path / "y.csv").write_text("a,b;c\n1,2;3\n")
    (sample,) = SampleAssembler(open_part_list(str(tmp_path / "y.csv"), delimiter=";", key_format="k{number}"))
    assert (sample["__key__"], sample["a,b"], sample["c"]) == ("k0", b"1,2", b"3")


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("nothing", None, "there is no recipe nothing, and no folder"),
        ("", None, "the name of the source is empty"),
        ("", "folder", "the name of the source is empty"),
        ("no\x1b[2J", None, r"there is no recipe no\\x1b\[2J"),
        ("no\x1b[2J", "folder", r"no\\x1b\[2J is not a folder"),
        ("nothing.csv", None, "there is no plan nothing.csv"),
        ("nothing", "folder", "nothing is not a folder"),
        (".", "recipe", ". is a folder, not a recipe"),
        ("x.tar", None, "recipe x.tar is not text"),
    ],
)
def test_part_list_says_what_is_wrong_with_its_source(
    source: str, kind: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is not."""
    monkeypatch.chdir(tmp_path)
    Path("x.tar").write_bytes(bytes(1024))
    with pytest.raises(SpecError, match=message):
        open_part_list(source, kind)


def test_part_list_that_is_no_file_has_its_relative_names_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output of a command, as a shell hands it over by ``<(command)``."""
    monkeypatch.chdir(tmp_path)
    Path("a.bin").write_text("here")
    reading, writing = os.pipe()
    os.write(writing, b"a.bin a.bin\n")
    os.close(writing)
    try:
        (sample,) = SampleAssembler(open_part_list(f"/dev/fd/{reading}"))
    finally:
        os.close(reading)
    assert sample["bin"] == b"here"


def test_part_list_from_elsewhere_has_its_relative_names_there() -> None:
    """A recipe in a store names files of the store, and runs no command."""
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe("/lists/x.txt", b"a.bin sub/x.bin\n")
    store.pipe("/lists/sub/x.bin", b"there")
    store.pipe("/lists/y.txt", b"a.bin pipe:echo\n")
    try:
        (sample,) = SampleAssembler(open_part_list("memory://lists/x.txt"))
        assert sample["bin"] == b"there"
        with pytest.raises(SpecError, match="runs a command, which a recipe may do only with --allow-pipe"):
            SampleAssembler(open_part_list("memory://lists/y.txt")).check()
    finally:
        store.rm("/lists", recursive=True)


@pytest.mark.parametrize("is_secure", [True, False])
def test_part_list_renders_templates_for_no_stranger(
    is_secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could send what the environment holds to a server; a recipe of one's own may, unless WDS_SECURE=1."""
    (tmp_path / "list.json").write_text('{"a": "base64:QQ=="}')
    source = f"simplecache::reference://a::file://{tmp_path}/list.json"
    for others in (Plan(f"@bin\n{source}\n".encode()), Recipe(f"a.bin {source}\n".encode())):
        with pytest.raises(SpecError, match="renders templates"):
            SampleAssembler(others).check()
    own = Recipe(f"a.bin {source}\n".encode(), allow_pipe=True)
    if is_secure:
        monkeypatch.setenv("WDS_SECURE", "1")
        with pytest.raises(SpecError, match="renders templates"):
            SampleAssembler(own).check()
    else:
        assert [sample["bin"] for sample in SampleAssembler(own)] == [b"A"]


def test_part_list_checks_files_of_a_folder_that_is_a_url(tmp_path: Path) -> None:
    """As those of any other: before anything is read."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b/x.bin").write_text("here")
    (tmp_path / "r.txt").write_text("a.bin x.bin\nb.bin gone.bin\n")
    parts = open_part_list(str(tmp_path / "r.txt"), folder=f"file://{tmp_path}/a%20b")
    with pytest.raises(SpecError, match="line 2: there is no file"):
        SampleAssembler(parts).check()
    (sample,) = SampleAssembler(parts, "skip-file")
    assert sample["bin"] == b"here"
