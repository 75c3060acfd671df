"""Plans: tables to parts, and what is no table."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.create.assembling import SampleAssembler
from torchdata_wds.cli.create.part_lists import Plan
from torchdata_wds.cli.tables import write_cell
from torchdata_wds.errors import SpecError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


def samples_of(text: str | bytes, folder: Path | str = "", **options: Any) -> list[dict[str, Any]]:
    """The samples of a plan, without their URL."""
    data = text if isinstance(text, bytes) else text.encode()
    samples = list(SampleAssembler(Plan(data, "x.tsv", str(folder), **options)))
    assert {sample.pop("__url__") for sample in samples} == {"x.tsv"}
    return samples


def problems_of(text: str | bytes, folder: Path | str = "", **options: Any) -> list[str]:
    """The lines of the error that a plan gives, without the first."""
    with pytest.raises(SpecError) as caught:
        samples_of(text, folder, **options)
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_plan_has_texts_and_files_by_column(tmp_path: Path) -> None:
    """A column @jpg names files, and becomes the field jpg; fields are lower-cased."""
    (tmp_path / "1.jpg").write_bytes(b"\xff\xd8")
    assert samples_of("__key__\t@JPG\tcls\nd/a\t1.jpg\t3\nb\tfile:1.jpg\t\n", tmp_path) == [
        {"__key__": "d/a", "jpg": b"\xff\xd8", "cls": b"3"},
        {"__key__": "b", "jpg": b"\xff\xd8", "cls": b""},
    ]


def test_plan_numbers_its_samples_when_it_has_no_keys() -> None:
    """From 0, nine digits, or as the format says."""
    assert [sample["__key__"] for sample in samples_of("cls\n5\n6\n")] == ["000000000", "000000001"]
    assert [sample["__key__"] for sample in samples_of("cls\n5\n6\n", key_format="d/{number:x}")] == ["d/0", "d/1"]


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
    assert samples_of('txt,cls\r\n"a, ""b""\r\nc\\n",1\r\n\r\n\\t,2', delimiter=",") == [
        {"__key__": "000000000", "txt": b'a, "b"\r\nc\\n', "cls": b"1"},
        {"__key__": "000000001", "txt": b"\\t", "cls": b"2"},
    ]


def test_plan_with_commas_takes_long_cells() -> None:
    """Longer than the csv module allows by itself."""
    text = "x" * 200_000
    assert samples_of(f"txt;cls\n{text};1\n", delimiter=";")[0]["txt"] == text.encode()


def test_plan_with_tabs_has_escapes_and_no_quotes() -> None:
    """As ``wds tsv`` writes it; a line is a row."""
    assert samples_of('txt\tcls\n"a\\tb\\n\\\\"\t\\xff\r\n') == [
        {"__key__": "000000000", "txt": b'"a\tb\n\\"', "cls": b"\xff"}
    ]


def test_plan_with_tabs_takes_backslashes_as_they_are_when_asked() -> None:
    """A table that another program wrote."""
    assert samples_of("txt\tcls\n\\theta\\\t1\n", no_escapes=True)[0]["txt"] == b"\\theta\\"


def test_plan_with_one_column_takes_an_empty_line_as_an_empty_cell() -> None:
    """No sample is lost; with more columns such a line is blank."""
    assert [sample["txt"] for sample in samples_of("txt\na\n\nb\n\n")] == [b"a", b"", b"b", b""]
    assert len(samples_of("txt\tcls\na\t1\n\nb\t2\n\n")) == 2


def test_plan_reads_base64_when_asked() -> None:
    """A text that begins so is one, otherwise."""
    plan = "bin\tcls\nbase64:/w==\t1\n"
    assert samples_of(plan)[0]["bin"] == b"base64:/w=="
    assert samples_of(plan, base64=True)[0]["bin"] == b"\xff"
    (problem,) = problems_of("bin\tcls\nbase64:/\t1\n", base64=True)
    assert problem.startswith("line 2: what follows base64: is not Base64")


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.binary(), TEXTS), min_size=1, max_size=5))
def test_plan_gives_back_what_was_written(rows: list[tuple[bytes, str]]) -> None:
    """Any bytes in a table with tabs, and any text in CSV."""
    tsv = "".join(f"{write_cell(data, 'escape')}\t{write_cell(text.encode())}\n" for data, text in rows)
    found = samples_of(f"a\tb\n{tsv}")
    assert [(sample["a"], sample["b"].decode()) for sample in found] == rows
    table = io.StringIO(newline="")
    csv.writer(table).writerows([("a", "b"), *((text, "x") for _, text in rows)])
    found = samples_of(table.getvalue(), delimiter=",")
    assert [sample["a"].decode() for sample in found] == [text for _, text in rows]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("", "line 1, column 1: field '' of sample"),
        ("__key__", "no column is a field"),
        ("a\t\tb", "line 1, column 2: field '' of sample '(any)' cannot be written"),
        ("a\t@A", "line 1, column 2: field 'a' has a column before"),
        ("@__key__\ta", "line 1, column 1: field '__key__' has a name of the form __x__"),
        ("a\t__url__", "line 1, column 2: field '__url__' has a name of the form __x__"),
        ("a/b\tc", "line 1, column 1: field 'a/b' of sample '(any)' cannot be written"),
    ],
)
def test_plan_says_what_is_wrong_with_its_first_line(header: str, problem: str) -> None:
    """Before any row."""
    assert problem in problems_of(f"{header}\n1\t2\n")[0]


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
        ("first\t1.txt\ta", "sample 'first' began at line 2, and others stand between. Each row needs a key"),
        (b"x\t1.txt\tcaf\xe9", "column 'cls': the text is not UTF-8, at its character 4"),
    ],
)
def test_plan_says_what_is_wrong_with_a_row(row: str | bytes, problem: str, tmp_path: Path) -> None:
    """The fourth line, behind good ones."""
    (tmp_path / "1.txt").write_text("1")
    data = row if isinstance(row, bytes) else row.encode()
    (found,) = problems_of(
        b"__key__\t@txt\tcls\nfirst\t1.txt\t0\nsecond\t1.txt\t0\n" + data + b"\nlast\t1.txt\t0\n", tmp_path
    )
    assert found.startswith("line 4")
    assert problem in found


def test_plan_refuses_a_key_that_comes_twice_in_a_row() -> None:
    """Two rows are two samples, which cannot be told apart."""
    assert problems_of("__key__\tcls\na\t1\na\t2\n") == ["line 3: field 'cls' of sample 'a' is given before, by line 2"]


def test_plan_names_the_line_where_a_quoted_row_begins() -> None:
    """A cell of several lines before it does not confuse the count."""
    assert problems_of('a,b\n"1\n2",3\nx\n', delimiter=",") == [
        "line 4: expected 2 cells as in the first line, found 1"
    ]
    assert problems_of('a,b\n1,2\n"x,\n', delimiter=",") == ["line 3: it is not CSV: unexpected end of data"]


@pytest.mark.parametrize("data", [b"a\0\tb\n1\t2\n", "a\tb\n1\t2\n".encode("utf-16"), bytes(100)])
def test_plan_is_refused_when_its_first_line_is_no_text(data: bytes) -> None:
    """A shard that was given for it, or a table in UTF-16; below, texts may hold whatever they hold."""
    with pytest.raises(SpecError, match=r"not a table in UTF-8: its first line has a NUL at byte \d+$"):
        Plan(data)
    assert samples_of("a\tb\n\0\t2\n")[0]["a"] == b"\0"


def test_plan_without_rows_is_an_error() -> None:
    """There is nothing to write."""
    with pytest.raises(SpecError, match="has no samples"):
        samples_of("a\tb\n")
