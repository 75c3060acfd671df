"""The commands ``tsv`` and ``json``."""

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kits.shards import sample_members, tar_bytes, write_tar, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.tables import Binary, JsonLines, StoredField, escape_cell, unescape_cell, write_cell
from torchdata_wds.errors import DecodingError

EVIL = "tab\t, line\n, \\ and \r größe".encode()
MEMBERS = [*sample_members("a", cls=b"3", txt=EVIL, png=b"\x89PNG"), *sample_members("b", cls=b"4", txt=b"plain")]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Two samples; the second has no png."""
    return write_tar(tmp_path / "x.tar", MEMBERS)


# -------------------------------------------------------------------------------------------------------------- tsv
def test_tsv_has_a_header_and_a_line_for_each_sample_when_run(shard: str) -> None:
    """The key first, then the fields in the order asked for."""
    done = run_wds("tsv", "-f", "txt cls", shard)
    header, first, second, end = done.text.split("\n")
    assert (header, second, end, done.status, done.err) == ("__key__\ttxt\tcls", "b\tplain\t4", "", 0, "")
    key, text, label = first.split("\t")
    assert (key, unescape_cell(text).encode(), label) == ("a", EVIL, "3")


def test_tsv_obeys_its_options_when_given(shard: str) -> None:
    """Which columns, which lines, and what is missing."""
    for options, out in (
        (["-f", "cls", "--no-key"], "cls\n3\n4\n"),
        (["-f", "cls", "--no-header"], "a\t3\nb\t4\n"),
        (["-f", "cls", "-c", "1"], "__key__\tcls\na\t3\n"),
        (["-f", "cls", "-c", "0"], "__key__\tcls\n"),
        (["-f", "label=cls", "--slice", "1"], "__key__\tlabel\nb\t4\n"),
        (["-f", "cls __key__", "--no-header"], "3\ta\n4\tb\n"),
        (["-f", "c*", "--no-header"], "a\t3\nb\t4\n"),
        (["-f", "png", "--missing", "skip", "--no-header", "--binary", "escape"], "a\t\\x89PNG\n"),
        (["-f", "png", "--missing", "empty", "--no-header", "--binary", "base64"], "a\tbase64:iVBORw==\nb\t\n"),
    ):
        done = run_wds("tsv", *options, shard)
        assert (done.text, done.status) == (out, 0)


def test_tsv_reads_no_further_than_it_must_when_counting(tmp_path: Path) -> None:
    """What lies behind may be damaged."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(MEMBERS)[:-2000])
    assert run_wds("tsv", "-f", "cls", "-c", "1", path).status == 0
    assert run_wds("tsv", "-f", "cls", path).status == 1


def test_tsv_fails_when_a_field_is_missing(shard: str) -> None:
    """The sample is named; or it is left out and counted, and the status says so."""
    done = run_wds("tsv", "-f", "cls png", "--binary", "escape", shard)
    assert done.status == 1
    assert "wds tsv: error: sample 'b' of shard" in done.err
    skipped = run_wds("tsv", "-f", "cls png", "--binary", "escape", "--errors", "skip", shard)
    assert (skipped.text.count("\n"), skipped.status) == (2, 1)
    assert "lost: 1" in skipped.err
    asked = run_wds("tsv", "-f", "cls png", "--binary", "escape", "--missing", "skip", shard)
    assert (asked.text.count("\n"), asked.status) == (2, 0)
    assert "left out 1 sample without the fields" in asked.err


def test_tsv_fails_when_a_field_is_binary(shard: str) -> None:
    """The place and the cure are named."""
    done = run_wds("tsv", "-f", "jpg;png", shard)
    assert done.status == 1
    assert "field 'jpg;png' of sample 'a' of shard" in done.err
    assert "byte 0 of 4 is b'\\x89', which is not UTF-8" in done.err
    assert "--binary base64" in done.err


def test_tsv_needs_fields_when_run(shard: str) -> None:
    """A table has the same columns in all lines."""
    done = run_wds("tsv", shard)
    assert done.status == 2
    assert "-f/--fields" in done.err


@pytest.mark.parametrize("spec", ["", "a=", "=b", "cls cls"])
def test_tables_refuse_when_fields_are_malformed(spec: str, shard: str) -> None:
    """Before anything is read or written."""
    for command in ("tsv", "json"):
        done = run_wds(command, "-f", spec, shard)
        assert (done.status, done.text) == (2, "")


def test_tsv_masks_secrets_when_urls_are_asked_for(tmp_path: Path) -> None:
    """Output ends up in logs."""
    path = write_tar(tmp_path / "x.tar", MEMBERS)
    assert run_wds("tsv", "-f", "__url__", "--no-key", "--no-header", "-c", "1", path).text == f"{path}\n"
    secret = f"pipe:cat {path} # https://user:pa55word@host/"
    masked = run_wds("tsv", "-f", "__url__", "--no-key", "--no-header", "-c", "1", secret)
    assert masked.status == 0
    assert "pa55word" not in masked.text


# ------------------------------------------------------------------------------------------------------------- json
def lines(*arguments: object, **options: Any) -> list[Any]:
    """The objects that were written."""
    done = run_wds("json", *arguments, **options)
    assert done.status == 0, done.err
    return [json.loads(line) for line in done.out.split(b"\n")[:-1]]


def test_json_has_all_fields_when_run(shard: str) -> None:
    """Decoded by their names; binary ones in Base64."""
    png = {"base64": base64.b64encode(b"\x89PNG").decode()}
    assert lines(shard) == [
        {"__key__": "a", "cls": 3, "txt": EVIL.decode(), "png": png},
        {"__key__": "b", "cls": 4, "txt": "plain"},
    ]


def test_json_obeys_its_options_when_given(shard: str) -> None:
    """Which fields, under which names; what is missing is null."""
    for options, values in (
        (["-f", "cls"], [{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}]),
        (["-f", "cls", "--no-key"], [{"cls": 3}, {"cls": 4}]),
        (["-f", "label=cls", "-c", "1"], [{"__key__": "a", "label": 3}]),
        (["-f", "png nix;nothing", "--missing", "empty", "--slice", "1"], [{"__key__": "b", "png": None, "nix": None}]),
        (["-f", "c* png", "--missing", "skip", "--binary", "skip"], [{"__key__": "a", "cls": 3}]),
        (["--binary", "skip", "--slice", "0", "-f", "*"], [{"__key__": "a", "cls": 3, "txt": EVIL.decode()}]),
    ):
        assert lines(*options, shard) == values


def test_json_tells_what_it_left_out_when_asked_to(shard: str) -> None:
    """Counts on stderr, and status 0: it was asked for."""
    done = run_wds("json", "--binary", "skip", shard)
    assert (done.status, done.err) == (0, "wds: left out 1 field that JSON cannot hold (--binary skip)\n")


def test_json_fails_when_a_field_does_not_decode(tmp_path: Path) -> None:
    """The sample is told, and the others are written, if that was asked for."""
    members = [*sample_members("a", cls=b"x"), *sample_members("b", cls=b"1")]
    path = write_tar(tmp_path / "x.tar", members)
    done = run_wds("json", path)
    assert (done.status, done.text) == (1, "")
    assert "field 'cls' of sample 'a'" in done.err
    skipped = run_wds("json", "--errors", "skip", path)
    assert (skipped.status, skipped.text) == (1, '{"__key__":"b","cls":1}\n')


def test_json_has_the_url_when_asked_for(shard: str) -> None:
    """By its name in the list of fields."""
    assert lines("-f", "cls __url__", "-c", "1", shard) == [{"__key__": "a", "__url__": shard, "cls": 3}]


def test_json_reads_several_shards_when_given(tmp_path: Path) -> None:
    """And standard input when there are none."""
    urls = write_text_shards(tmp_path, (2, 1))
    assert [line["__key__"] for line in lines(*urls)] == ["s0-00000", "s0-00001", "s1-00000"]
    assert len(lines(stdin=tar_bytes(MEMBERS))) == 2


CELLS = {
    "": "",
    "plain": "plain",
    "a\tb": r"a\tb",
    "a\nb\r\n": r"a\nb\r\n",
    "a\\tb": r"a\\tb",
    "\\": r"\\",
    "größe \u2028 \0": "größe \u2028 \0",
    "caf\udce9": r"caf\xe9",
}


@pytest.mark.parametrize(("text", "cell"), CELLS.items())
def test_cell_is_as_documented_when_text_has_signs_of_its_own(text: str, cell: str) -> None:
    """Tabs, line ends and backslashes are escaped, nothing else."""
    assert escape_cell(text) == cell
    assert unescape_cell(cell) == text


@settings(max_examples=30, deadline=None)
@given(st.text())
def test_text_reads_back_when_written_to_a_cell(text: str) -> None:
    """Any text is one cell of one line."""
    cell = escape_cell(text)
    assert not set("\t\n\r") & set(cell)
    assert unescape_cell(cell) == text


@settings(max_examples=30, deadline=None)
@given(
    st.binary() | st.sampled_from([b"base64:/w==", b"\\xff", b"\\", b"base64:\xff"]),
    st.sampled_from(["escape", "base64"]),
)
def test_bytes_read_back_when_written_to_a_cell(data: bytes, binary: Binary) -> None:
    """Either way of writing binary data loses none of it, and keeps text that looks like it."""
    cell = write_cell(data, binary)
    assert not set("\t\n\r") & set(cell)
    cell.encode()
    if binary == "base64" and cell.startswith("base64:"):
        assert base64.b64decode(cell.removeprefix("base64:"), validate=True) == data
    else:
        assert unescape_cell(cell).encode(errors="surrogateescape") == data


def test_write_cell_names_the_byte_when_data_is_binary() -> None:
    """By default bytes that are not UTF-8 are an error that says where they are."""
    with pytest.raises(ValueError, match=r"byte 3 of 5 is b'\\xe9', which is not UTF-8"):
        write_cell(b"caf\xe9!")


def test_escape_cell_refuses_when_text_has_a_lone_surrogate() -> None:
    """UTF-8 has no bytes for it."""
    with pytest.raises(ValueError, match=r"character 1 of .* lone surrogate"):
        escape_cell("a\ud800")


@pytest.mark.parametrize("cell", ["\\", r"a\q", r"\x4", r"\x41", r"\X80"])
def test_unescape_cell_refuses_when_a_backslash_escapes_nothing(cell: str) -> None:
    """A file that was written by something else does not read as something else."""
    with pytest.raises(ValueError, match="backslash at character"):
        unescape_cell(cell)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def strict(line: bytes) -> Any:
    """Reads a line as programs do that know no NaN."""

    def refuse(name: str) -> Any:
        raise AssertionError(name)

    assert b"\n" not in line
    return json.loads(line, parse_constant=refuse)


def holding_itself() -> list[Any]:
    """What torch saves and loads."""
    value: list[Any] = [1]
    value.append(value)
    return value


def doubled(value: Any, times: int) -> Any:
    """A small file that would be long in JSON."""
    for _ in range(times):
        value = [value, value]
    return value


VALUES = [
    ("txt", "größe\n\u2028".encode(), "größe\n\u2028"),
    ("cls", b" 7\n", 7),
    ("json", b'{"a": [1, 2.5, null, true, "\xc3\xa4"]}', {"a": [1, 2.5, None, True, "ä"]}),
    ("x.json", b"[]", []),
    ("npy", npy(np.array([[1, 2], [3, 4]])), [[1, 2], [3, 4]]),
    ("npz", npz(a=np.array([1.5]), b=np.array(2)), {"a": [1.5], "b": 2}),
    ("pth", saved({"w": torch.tensor([1, 2]), "n": [torch.tensor(0.5)]}), {"w": [1, 2], "n": [0.5]}),
    ("msgpack", msgpack.packb({"a": 1}), {"a": 1}),
    ("cbor", cbor2.dumps({"a": [True]}), {"a": [True]}),
    ("wnid", b"n01440764", "n01440764"),
    ("caption.gz", gzip.compress(b"text", mtime=0), "text"),
    ("json", b"12345678901234567890123", 12345678901234567890123),
    ("txt", b"", ""),
    ("bin", b"", ""),
]

BINARY = [
    ("pth", saved(holding_itself())),
    ("pth", saved(torch.empty(3, device="meta"))),
    ("pth", saved(torch.zeros(1).expand(1 << 40))),
    ("pth.gz", __import__("gzip").compress(saved(doubled("x" * (1 << 20), 30)))),
    ("cbor", cbor2.dumps(holding_itself(), value_sharing=True)),
    ("jpg", b"P6 this is text"),
    ("bin", b"\xff\x00"),
    ("pyd", b"I1\n."),
    ("json", b"[NaN]"),
    ("json", b'{"a": -Infinity}'),
    ("npy", npy(np.array([np.nan, 1]))),
    ("npy", npy(np.array([1j]))),
    ("msgpack", msgpack.packb({1: 2})),
    ("msgpack", msgpack.packb([b"raw"])),
    ("mp4", bytes(3)),
]


@pytest.mark.parametrize(("field", "data", "value"), VALUES)
def test_line_has_the_decoded_value_when_json_can_hold_it(field: str, data: bytes, value: Any) -> None:
    """By the field's name, as everywhere."""
    assert strict(JsonLines()({"__key__": "k", field: data})) == {"__key__": "k", field: value}


@pytest.mark.parametrize(("field", "data"), BINARY)
def test_line_has_base64_when_json_cannot_hold_the_value(field: str, data: bytes) -> None:
    """The stored bytes, whatever they are: nothing is lost, nothing is changed, and the JSON is strict."""
    assert base64.b64decode(strict(JsonLines()({"__key__": "k", field: data}))[field]["base64"]) == data


@pytest.mark.parametrize(("field", "data"), BINARY)
def test_line_leaves_out_when_binary_is_skipped(field: str, data: bytes) -> None:
    """What was left out is counted."""
    lines = JsonLines(binary="skip")
    assert strict(lines({field: data, "cls": b"1"})) == {"cls": 1}
    assert lines.skipped == 1


def test_line_decodes_by_the_old_name_when_a_field_was_renamed() -> None:
    """And null stands for a field that is not there."""
    assert strict(JsonLines()({"label": StoredField("cls", b"3"), "nix": None})) == {"label": 3, "nix": None}


def test_text_that_says_nan_stays_when_it_is_a_string() -> None:
    """Only numbers are looked at."""
    assert strict(JsonLines()({"txt": b"NaN", "json": b'["Infinity"]'})) == {"txt": "NaN", "json": ["Infinity"]}


@pytest.mark.parametrize(("field", "data"), [("cls", b"x"), ("json", b"{"), ("txt", b"\xff")])
def test_line_raises_when_a_field_does_not_decode(field: str, data: bytes) -> None:
    """The sample and the field are named."""
    with pytest.raises(DecodingError, match=f"{field}.*'k'"):
        JsonLines()({"__key__": "k", field: data})
