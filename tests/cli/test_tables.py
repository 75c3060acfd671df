"""The commands ``tsv`` and ``json``."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.shards import sample_members, tar_bytes, write_tar, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.tables import unescape_cell

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


@pytest.mark.parametrize(
    ("options", "out"),
    [
        (["-f", "cls", "--no-key"], "cls\n3\n4\n"),
        (["-f", "cls", "--no-header"], "a\t3\nb\t4\n"),
        (["-f", "cls", "-c", "1"], "__key__\tcls\na\t3\n"),
        (["-f", "cls", "-c", "0"], "__key__\tcls\n"),
        (["-f", "label=cls", "--slice", "1"], "__key__\tlabel\nb\t4\n"),
        (["-f", "cls __key__", "--no-header"], "3\ta\n4\tb\n"),
        (["-f", "c*", "--no-header"], "a\t3\nb\t4\n"),
        (["-f", "png", "--missing", "skip", "--no-header", "--binary", "escape"], "a\t\\x89PNG\n"),
        (["-f", "png", "--missing", "empty", "--no-header", "--binary", "base64"], "a\tbase64:iVBORw==\nb\t\n"),
    ],
)
def test_tsv_obeys_its_options_when_given(options: list[str], out: str, shard: str) -> None:
    """Which columns, which lines, and what is missing."""
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


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (["-f", "cls"], [{"__key__": "a", "cls": 3}, {"__key__": "b", "cls": 4}]),
        (["-f", "cls", "--no-key"], [{"cls": 3}, {"cls": 4}]),
        (["-f", "label=cls", "-c", "1"], [{"__key__": "a", "label": 3}]),
        (["-f", "png nix;nothing", "--missing", "empty", "--slice", "1"], [{"__key__": "b", "png": None, "nix": None}]),
        (["-f", "c* png", "--missing", "skip", "--binary", "skip"], [{"__key__": "a", "cls": 3}]),
        (["--binary", "skip", "--slice", "0", "-f", "*"], [{"__key__": "a", "cls": 3, "txt": EVIL.decode()}]),
    ],
)
def test_json_obeys_its_options_when_given(options: list[str], values: list[Any], shard: str) -> None:
    """Which fields, under which names; what is missing is null."""
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
