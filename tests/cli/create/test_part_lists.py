"""Lists of parts: folders, recipes and plans, which files and lines are parts, and what is said of the others."""

import csv
import io
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.create import open_part_list
from torchdata_wds.cli.create.assembling import PartList, Problems, SampleAssembler
from torchdata_wds.cli.create.part_lists import Plan, Recipe, SampleFolder
from torchdata_wds.cli.tables import write_cell
from torchdata_wds.errors import SpecError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def samples_of(kind: Any, data: str | bytes | Path, folder: Path | str = "", **options: Any) -> list[dict[str, Any]]:
    """The samples of a list, without their URL."""
    parts: PartList
    if isinstance(data, Path):
        parts = kind(str(data))
    else:
        options = {"allow_pipe": True, **options} if kind is Recipe else options
        parts = kind(data.encode() if isinstance(data, str) else data, "x.txt", str(folder), **options)
    samples = list(SampleAssembler(parts))
    assert {sample.pop("__url__") for sample in samples} == {parts.url}
    return samples


def problems_of(kind: Any, data: str | bytes | Path, folder: Path | str = "", **options: Any) -> list[str]:
    """The lines of the error that a list gives, without the first."""
    with pytest.raises(SpecError) as caught:
        samples_of(kind, data, folder, **options)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


# ------------------------------------------------------------------------------------------------------------ folders
def write_files(folder: Path, *names: str) -> None:
    """Files whose content is their name."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(name))


def skipped(folder: Path) -> dict[str, int]:
    """What is passed over, by reason."""
    files = SampleFolder(str(folder))
    list(files.parts(Problems(files.name)))
    return dict(files.skipped)


def test_folder_groups_where_a_sort_by_name_would_not(tmp_path: Path) -> None:
    """``a-b.jpg`` sorts between ``a-b`` and ``a.``; keys with folders, dots in folders, capitals in fields."""
    write_files(tmp_path, "a.txt", "a-b.jpg", "a.JPG", "a b.txt", "d.v1/a.txt", "d/a.seg.png", "d/a.txt", "B.txt")
    assert samples_of(SampleFolder, tmp_path) == [
        {"__key__": "B", "txt": b"B.txt"},
        {"__key__": "a", "jpg": b"a.JPG", "txt": b"a.txt"},
        {"__key__": "a b", "txt": b"a b.txt"},
        {"__key__": "a-b", "jpg": b"a-b.jpg"},
        {"__key__": "d.v1/a", "txt": b"d.v1/a.txt"},
        {"__key__": "d/a", "seg.png": b"d/a.seg.png", "txt": b"d/a.txt"},
    ]


def test_folder_is_read_alike_when_its_name_ends_in_a_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the working directory."""
    write_files(tmp_path, "d/a.txt")
    monkeypatch.chdir(tmp_path)
    for name in (f"{tmp_path}/", ".", "./"):
        assert [sample["__key__"] for sample in SampleAssembler(SampleFolder(name))] == ["d/a"]


def test_folder_counts_what_makes_no_sample(tmp_path: Path) -> None:
    """By reason; hidden folders as a whole."""
    write_files(
        tmp_path, "a.txt", "README", "d/LICENSE", ".hidden.txt", "x.", ".git/a.txt", "__meta__/a.json", "._a.txt"
    )
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo.txt")
    assert skipped(tmp_path) == {
        "no extension": 2,
        "hidden file": 1,
        "empty extension": 1,
        "hidden folder": 1,
        "metadata": 1,
        "macOS metadata": 1,
        "no regular file": 1,
    }
    assert [sample["__key__"] for sample in samples_of(SampleFolder, tmp_path)] == ["a"]


def test_folder_passes_over_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading one would fail."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind("a.sock")
        assert skipped(Path()) == {"no regular file": 1}


def test_folder_follows_links_to_files_only(tmp_path: Path) -> None:
    """A link to a folder may lead in a circle."""
    write_files(tmp_path, "outside/b.txt", "data/a.txt")
    data = tmp_path / "data"
    (data / "link.txt").symlink_to(tmp_path / "outside/b.txt")
    (data / "circle").symlink_to(data)
    (data / "folder.txt").symlink_to(tmp_path / "outside")
    assert samples_of(SampleFolder, data) == [
        {"__key__": "a", "txt": b"data/a.txt"},
        {"__key__": "link", "txt": b"outside/b.txt"},
    ]
    assert skipped(data) == {"link to a folder": 2}


def test_folder_names_links_that_lead_nowhere(tmp_path: Path) -> None:
    """They are files that are missing; one that leads to itself cannot be read."""
    write_files(tmp_path, "a.txt")
    (tmp_path / "b.txt").symlink_to("nothing")
    (tmp_path / "c.txt").symlink_to("c.txt")
    missing, circle = problems_of(SampleFolder, tmp_path)
    assert "there is no file" in missing
    assert "b.txt" in missing
    assert "Too many levels of symbolic links" in circle
    (tmp_path / "c.txt").unlink()
    samples = SampleAssembler(SampleFolder(str(tmp_path)), "skip-file")
    assert [sample["__key__"] for sample in samples] == ["a"]
    assert (samples.missing_files, samples.left_out) == (1, 1)


def test_folder_refuses_fields_that_differ_in_case_only(tmp_path: Path) -> None:
    """They would be read as one; both files are named."""
    write_files(tmp_path, "a.JPG", "a.jpg")
    (problem,) = problems_of(SampleFolder, tmp_path)
    assert problem == (
        f"file '{tmp_path}/a.jpg': field 'jpg' of sample 'a' was already given by file '{tmp_path}/a.JPG'"
    )


def test_folder_refuses_names_that_could_not_be_read_back(tmp_path: Path) -> None:
    """Those that are no UTF-8, and reserved fields."""
    write_files(tmp_path, "a.__key__", "\udcff.txt")
    reserved, garbled = problems_of(SampleFolder, tmp_path)
    assert "field '__key__' has a name of the form __x__" in reserved
    assert "not a character of its own" in garbled


def test_folder_names_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read."""
    write_files(tmp_path, "a.txt", "b.txt")
    (tmp_path / "a.txt").chmod(0o600)
    monkeypatch.setattr(os, "access", lambda path, _: not path.endswith("a.txt"))
    (problem,) = problems_of(SampleFolder, tmp_path)
    assert problem.endswith("a.txt' cannot be read: Permission denied")


def test_folder_says_so_when_a_folder_vanishes(tmp_path: Path) -> None:
    """A folder that cannot be listed is an error."""
    (problem,) = problems_of(SampleFolder, tmp_path / "gone")
    assert problem == f"folder '{tmp_path}/gone/': it cannot be read: No such file or directory"


@pytest.mark.parametrize("names", [(), ("README",)])
def test_folder_without_samples_is_an_error(names: tuple[str, ...], tmp_path: Path) -> None:
    """Most likely it is the wrong folder."""
    write_files(tmp_path, *names)
    with pytest.raises(SpecError, match="has no samples: there is nothing to write"):
        samples_of(SampleFolder, tmp_path)


def test_folder_goes_as_deep_as_folders_do(tmp_path: Path) -> None:
    """Deep trees do not hit the recursion limit."""
    name = "d/" * 300 + "a.txt"
    write_files(tmp_path, name)
    assert samples_of(SampleFolder, tmp_path) == [{"__key__": name.removesuffix(".txt"), "txt": name.encode()}]


# ------------------------------------------------------------------------------------------------------------ recipes
def test_recipe_takes_every_kind_of_source(tmp_path: Path) -> None:
    """A path, file:, text:, base64:, pipe: and a URL, each byte for byte."""
    (tmp_path / "a b.bin").write_bytes(b"\x00\xff\n")
    recipe = (
        "a.path a b.bin\n"
        "a.file file:a%20b.bin\n"
        f"a.absolute {tmp_path}/a b.bin\n"
        "a.text text:  two words \n"
        "a.none text:\n"
        "a.base64 base64:AP8K\n"
        "a.pipe pipe:printf '1 2' | tr 1 3\n"
        f"a.url file://{tmp_path}/a%20b.bin\n"
    )
    content = b"\x00\xff\n"
    assert samples_of(Recipe, recipe, tmp_path) == [
        {
            "__key__": "a",
            "path": content,
            "file": content,
            "absolute": content,
            "text": b"  two words ",
            "none": b"",
            "base64": content,
            "pipe": b"3 2",
            "url": content,
        }
    ]


def test_recipe_keeps_its_order_of_samples() -> None:
    """Nobody has asked to sort them."""
    assert [sample["__key__"] for sample in samples_of(Recipe, "z.a text:1\nb.a text:2\nm.a text:3")] == ["z", "b", "m"]


def test_recipe_is_sorted_by_key_when_asked() -> None:
    """The lines of a sample come together from wherever they are."""
    assert samples_of(Recipe, "b.x text:1\na-b.x text:2\na.x text:3\nb.y text:4\n", sort=True) == [
        {"__key__": "a", "x": b"3"},
        {"__key__": "a-b", "x": b"2"},
        {"__key__": "b", "x": b"1", "y": b"4"},
    ]


def test_recipe_refuses_lines_of_a_sample_that_are_apart() -> None:
    """Both lines are named, and the cure."""
    (problem,) = problems_of(Recipe, "a.x text:1\nb.x text:2\na.y text:3\n")
    assert problem == (
        "line 3: sample 'a' began at line 1, and others come between. "
        "Put the lines of a sample together, or sort them (--sort)"
    )


@pytest.mark.parametrize("sort", [False, True])
def test_recipe_refuses_a_field_that_comes_twice(sort: bool) -> None:
    """Also where it differs in case only: it would be read as the same."""
    assert problems_of(Recipe, "a.jpg text:1\na.JPG text:2\n", sort=sort) == [
        "line 2: field 'jpg' of sample 'a' was already given by line 1"
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a.txt", "expected a name and a source"),
        ("a.txt \t", "expected a name and a source"),
        ("README text:x", "belongs to no sample: no extension"),
        ("d/.hidden.txt text:x", "belongs to no sample: hidden file"),
        ("__meta__/a.txt text:x", "belongs to no sample: metadata"),
        ("/a.txt text:x", "key '/a' cannot be written"),
        ("../a.txt text:x", "key '../a' cannot be written"),
        ("a.__key__ text:x", "field '__key__' has a name of the form __x__"),
        ("a.txt -", "standard input ('-') cannot be the source"),
        ("a.txt file:", "it names no file"),
        ("a.txt file://elsewhere/x", "not of host 'elsewhere'"),
        ("a.txt pipe: ", "pipe: names no command"),
        ("a.txt base64:!!", "what follows base64: is not Base64"),
        ("a.txt nothing.txt", "there is no file"),
        ("a.txt .", "is a folder"),
        ("a.txt /dev/null", "is not a regular file"),
        (b"\xff.txt text:x", "'\\udcff', which is not a character of its own"),
    ],
)
def test_recipe_says_what_is_wrong_with_a_line(line: str | bytes, problem: str, tmp_path: Path) -> None:
    """The second line, between good ones."""
    data = line if isinstance(line, bytes) else line.encode()
    (found,) = problems_of(Recipe, b"x.txt text:1\n" + data + b"\ny.txt text:2\n", tmp_path)
    assert found.startswith("line 2: ")
    assert problem in found


def test_recipe_reports_the_first_twenty_problems_and_counts_all() -> None:
    """A recipe is not mended line by line."""
    with pytest.raises(SpecError, match=r"^recipe x\.txt has 1,001 problems, and nothing was written:\n") as caught:
        samples_of(Recipe, "a.txt\n" * 1001)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[20].startswith("  line 20: ")
    assert lines[21] == "  and 981 more"


def test_recipe_takes_lines_of_other_systems_and_blank_ones() -> None:
    r"""A BOM, \r\n, blank lines, blanks before a name, a tab between, no line end at the end."""
    assert samples_of(Recipe, "\ufeffa.txt\t \ttext:1\r\n\r\n  \n  b.txt text:\u2028\x0b2") == [
        {"__key__": "a", "txt": b"1"},
        {"__key__": "b", "txt": "\u2028\x0b2".encode()},
    ]


def test_recipe_keeps_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    """In the name of a file, and in a text."""
    (tmp_path / "\udcff.bin").write_bytes(b"found")
    assert samples_of(Recipe, b"a.path \xff.bin\na.text text:\xfe\n", tmp_path) == [
        {"__key__": "a", "path": b"found", "text": b"\xfe"}
    ]


def test_recipe_is_refused_when_it_is_no_text() -> None:
    """A shard that was given for it, say."""
    with pytest.raises(SpecError, match=r"not text with lines .* it has a NUL at byte 3"):
        Recipe(b"a.x\0\0\0", "x.tar")


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_recipe_without_lines_is_an_error(text: str) -> None:
    """An empty archive is nothing that anybody wants."""
    with pytest.raises(SpecError, match="has no samples"):
        samples_of(Recipe, text)


def test_recipe_masks_secrets_in_messages() -> None:
    """A signed URL and a token of a command."""
    with pytest.raises(SpecError) as caught:
        samples_of(Recipe, "a.txt pipe:curl --token abcdef\na.txt nohost://u:abcdef@h/?token=abcdef\n")
    assert "field 'txt' of sample 'a' was already given by line 1" in str(caught.value)
    assert "abcdef" not in str(caught.value)


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_recipe_finds_relative_paths_in_its_folder_or_another(
    folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the recipe, or the one that is named."""
    monkeypatch.chdir(tmp_path)
    for name in ("lists", "elsewhere"):
        Path(name).mkdir()
        (Path(name) / "x.bin").write_text(name)
    Path("lists/r.txt").write_text("a.txt x.bin\n")
    assert [sample["txt"] for sample in SampleAssembler(open_part_list("lists/r.txt", folder=folder))] == [
        (folder or "lists").encode()
    ]


# -------------------------------------------------------------------------------------------------------------- plans
def test_plan_has_texts_and_files_by_column(tmp_path: Path) -> None:
    """A column @jpg names files, and becomes the field jpg; fields are lower-cased."""
    (tmp_path / "1.jpg").write_bytes(b"\xff\xd8")
    assert samples_of(Plan, "__key__\t@JPG\tcls\nd/a\t1.jpg\t3\nb\tfile:1.jpg\t\n", tmp_path) == [
        {"__key__": "d/a", "jpg": b"\xff\xd8", "cls": b"3"},
        {"__key__": "b", "jpg": b"\xff\xd8", "cls": b""},
    ]


def test_plan_numbers_its_samples_when_it_has_no_keys() -> None:
    """From 0, nine digits, or as the format says."""
    assert [sample["__key__"] for sample in samples_of(Plan, "cls\n5\n6\n")] == ["000000000", "000000001"]
    assert [sample["__key__"] for sample in samples_of(Plan, "cls\n5\n6\n", key_format="d/{number:x}")] == [
        "d/0",
        "d/1",
    ]


@pytest.mark.parametrize("key_format", ["{", "", "a", "{key}", "{number}{key}", "{number.real}", "{number:q}", "{}"])
def test_plan_refuses_a_format_of_keys_that_does_not_count(key_format: str) -> None:
    """Whatever else a format could look up stays out of it."""
    with pytest.raises(UsageError, match="format of keys"):
        Plan(b"cls\n1\n", key_format=key_format)


@pytest.mark.parametrize("delimiter", ["", ",,", '"', "\n"])
def test_plan_refuses_a_wrong_delimiter(delimiter: str) -> None:
    """One character."""
    with pytest.raises(UsageError, match="delimiter of a table is one character"):
        Plan(b"cls\n1\n", delimiter=delimiter)


def test_plan_with_commas_is_csv() -> None:
    """Quotes hold commas, quotes and line ends; backslashes are what they are; blank lines are passed over."""
    assert samples_of(Plan, 'txt,cls\r\n"a, ""b""\r\nc\\n",1\r\n\r\n\\t,2', delimiter=",") == [
        {"__key__": "000000000", "txt": b'a, "b"\r\nc\\n', "cls": b"1"},
        {"__key__": "000000001", "txt": b"\\t", "cls": b"2"},
    ]


def test_plan_with_commas_takes_long_cells() -> None:
    """Longer than the csv module allows by itself."""
    text = "x" * 200_000
    assert samples_of(Plan, f"txt;cls\n{text};1\n", delimiter=";")[0]["txt"] == text.encode()


def test_plan_with_tabs_has_escapes_and_no_quotes() -> None:
    """As ``wds tsv`` writes it; a line is a row."""
    assert samples_of(Plan, 'txt\tcls\n"a\\tb\\n\\\\"\t\\xff\r\n') == [
        {"__key__": "000000000", "txt": b'"a\tb\n\\"', "cls": b"\xff"}
    ]


def test_plan_with_tabs_takes_backslashes_as_they_are_when_asked() -> None:
    """A table that another program wrote."""
    assert samples_of(Plan, "txt\tcls\n\\theta\\\t1\n", no_escapes=True)[0]["txt"] == b"\\theta\\"


def test_plan_with_one_column_takes_an_empty_line_as_an_empty_cell() -> None:
    """No sample is lost; with more columns such a line is blank."""
    assert [sample["txt"] for sample in samples_of(Plan, "txt\na\n\nb\n\n")] == [b"a", b"", b"b", b""]
    assert len(samples_of(Plan, "txt\tcls\na\t1\n\nb\t2\n\n")) == 2


def test_plan_reads_base64_when_asked() -> None:
    """A text that begins so is one, otherwise."""
    plan = "bin\tcls\nbase64:/w==\t1\n"
    assert samples_of(Plan, plan)[0]["bin"] == b"base64:/w=="
    assert samples_of(Plan, plan, base64=True)[0]["bin"] == b"\xff"
    (problem,) = problems_of(Plan, "bin\tcls\nbase64:/\t1\n", base64=True)
    assert problem.startswith("line 2: what follows base64: is not Base64")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.binary(), TEXTS), min_size=1, max_size=5))
def test_plan_gives_back_what_was_written(rows: list[tuple[bytes, str]]) -> None:
    """Any bytes in a table with tabs, and any text in CSV."""
    tsv = "".join(f"{write_cell(data, 'escape')}\t{write_cell(text.encode())}\n" for data, text in rows)
    found = samples_of(Plan, f"a\tb\n{tsv}")
    assert [(sample["a"], sample["b"].decode()) for sample in found] == rows
    table = io.StringIO(newline="")
    csv.writer(table).writerows([("a", "b"), *((text, "x") for _, text in rows)])
    found = samples_of(Plan, table.getvalue(), delimiter=",")
    assert [sample["a"].decode() for sample in found] == [text for _, text in rows]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("", "line 1, column 1: field '' of sample"),
        ("__key__", "no column is a field"),
        ("a\t\tb", "line 1, column 2: field '' of sample '(any)' cannot be written"),
        ("a\t@A", "line 1, column 2: field 'a' already has a column"),
        ("@__key__\ta", "line 1, column 1: field '__key__' has a name of the form __x__"),
        ("a\t__url__", "line 1, column 2: field '__url__' has a name of the form __x__"),
        ("a/b\tc", "line 1, column 1: field 'a/b' of sample '(any)' cannot be written"),
    ],
)
def test_plan_says_what_is_wrong_with_its_first_line(header: str, problem: str) -> None:
    """Before any row."""
    assert problem in problems_of(Plan, f"{header}\n1\t2\n")[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("x\t1.txt", "expected 3 cells as in the first line, found 2"),
        ("x\t1.txt\ta\tb", "expected 3 cells as in the first line, found 4"),
        ("x\tnothing.txt\ta", "there is no file"),
        ("x\t\ta", "the cell names no file"),
        ("x\tpipe:echo\ta", "a command (pipe:) is not a file"),
        ("x\t1.txt\t\\q", "column 'cls': the cell '\\\\q' has a backslash at character 0"),
        ("\t1.txt\ta", "key '' cannot be written"),
        ("x.y\t1.txt\ta", "key 'x.y' cannot be written"),
        ("first\t1.txt\ta", "sample 'first' began at line 2, and others come between. Each row needs a key"),
        (b"x\t1.txt\tcaf\xe9", "column 'cls': the text is not UTF-8, at its character 4"),
    ],
)
def test_plan_says_what_is_wrong_with_a_row(row: str | bytes, problem: str, tmp_path: Path) -> None:
    """The error names the fourth line, after three good ones."""
    (tmp_path / "1.txt").write_text("1")
    data = row if isinstance(row, bytes) else row.encode()
    (found,) = problems_of(
        Plan, b"__key__\t@txt\tcls\nfirst\t1.txt\t0\nsecond\t1.txt\t0\n" + data + b"\nlast\t1.txt\t0\n", tmp_path
    )
    assert found.startswith("line 4")
    assert problem in found


def test_plan_refuses_a_key_that_comes_twice_in_a_row() -> None:
    """Two rows are two samples, which cannot be told apart."""
    assert problems_of(Plan, "__key__\tcls\na\t1\na\t2\n") == [
        "line 3: field 'cls' of sample 'a' was already given by line 2"
    ]


def test_plan_names_the_line_where_a_quoted_row_begins() -> None:
    """A cell of several lines before it does not confuse the count."""
    assert problems_of(Plan, 'a,b\n"1\n2",3\nx\n', delimiter=",") == [
        "line 4: expected 2 cells as in the first line, found 1"
    ]
    assert problems_of(Plan, 'a,b\n1,2\n"x,\n', delimiter=",") == ["line 3: it is not CSV: unexpected end of data"]


@pytest.mark.parametrize("data", [b"a\0\tb\n1\t2\n", "a\tb\n1\t2\n".encode("utf-16"), bytes(100)])
def test_plan_is_refused_when_its_first_line_is_no_text(data: bytes) -> None:
    """A shard that was given for it, or a table in UTF-16; below, texts may hold whatever they hold."""
    with pytest.raises(SpecError, match=r"not a table in UTF-8: its first line has a NUL at byte \d+$"):
        Plan(data)
    assert samples_of(Plan, "a\tb\n\0\t2\n")[0]["a"] == b"\0"


def test_plan_without_rows_is_an_error() -> None:
    """There is nothing to write."""
    with pytest.raises(SpecError, match="has no samples"):
        samples_of(Plan, "a\tb\n")
