"""The command ``first``."""

import io
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.shards import sample_members, tar_bytes, write_tar
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.first import Condition
from torchdata_wds.cli.main import main
from torchdata_wds.errors import DecodingError, SampleError, UnsafeDataError

MEMBERS = [
    *sample_members("a", cls=b"1", txt=b"one dog"),
    *sample_members("b", cls=b"3", png=b"\x89PNG of b", txt=b"two cats", json=b'{"label": 5}'),
    *sample_members("c", cls=b"3", jpg=b"\xff\xd8 of c", png=b"\x89PNG of c", txt=b"a cat", json=b'{"label": 6}'),
]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Three samples: no image, one image, two images."""
    return write_tar(tmp_path / "x.tar", MEMBERS)


def test_first_writes_the_field_of_the_first_sample_when_it_matches(shard: str) -> None:
    """The bytes as they are stored, and its name on stderr."""
    for options, out, named in (
        ([], b"\x89PNG of b", "b.png"),
        (["-f", "jpg"], b"\xff\xd8 of c", "c.jpg"),
        (["-f", "txt", "--where", "cls=3"], b"two cats", "b.txt"),
        (["-f", "txt", "-w", "cls=3", "-w", "json.label>5"], b"a cat", "c.txt"),
        (["-f", "txt", "-w", "txt~*cat"], b"a cat", "c.txt"),
        (["-f", "t*", "-w", "cls!=1"], b"two cats", "b.txt"),
        (["-f", "jpg;png", "--slice", "2:"], b"\xff\xd8 of c", "c.jpg"),
        (["-f", "label=cls"], b"1", "a.label"),
        (["-f", "txt", "-w", "__key__=c"], b"a cat", "c.txt"),
    ):
        done = run_wds("first", *options, shard)
        assert (done.out, done.status) == (out, 0)
        assert done.err == f"wds: {named} of {shard}\n"


def test_first_stops_reading_when_it_has_found(tmp_path: Path) -> None:
    """What lies behind may be damaged."""
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes(MEMBERS)[:-2000])
    assert run_wds("first", "-f", "txt", path, tmp_path / "no-such.tar").status == 0


def test_first_says_so_when_nothing_is_found(shard: str) -> None:
    """Status 1, and what may be the matter."""
    for options, says in (
        (["-w", "cls=7"], "nothing found in 3 samples"),
        (["-w", "clss=7"], "nothing found in 3 samples; 3 have no 'clss'"),
        (["-f", "jpg", "-w", "cls=1"], "1 meets the conditions and has no field 'jpg'"),
    ):
        done = run_wds("first", *options, shard)
        assert (done.out, done.status) == (b"", 1)
        assert says in done.err


def test_first_writes_a_file_when_it_is_named(shard: str, tmp_path: Path) -> None:
    """Whole, and never over another one unless that is asked for."""
    path = tmp_path / "first.png"
    assert run_wds("first", "-o", path, shard).out == b""
    assert path.read_bytes() == b"\x89PNG of b"
    refused = run_wds("first", "-o", path, "-f", "jpg", shard)
    assert refused.status == 1
    assert "already exists; pass --force" in refused.err
    assert run_wds("first", "-o", path, "-f", "jpg", "--force", shard).status == 0
    assert path.read_bytes() == b"\xff\xd8 of c"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["first.png", "x.tar"]


def test_first_leaves_what_it_could_write_when_the_disk_is_full(tmp_path: Path) -> None:
    """Where the message says, and nothing under the final name."""
    path = write_tar(tmp_path / "x.tar", sample_members("a", txt=b"x" * 5000))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, old[1]))
    try:
        done = run_wds("first", "-f", "txt", "-o", tmp_path / "a.txt", path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (done.status, (tmp_path / "a.txt").exists()) == (1, False)
    assert f"what was written is in {tmp_path / 'a.txt.partial'}" in done.err
    assert (tmp_path / "a.txt.partial").read_bytes() == b"x" * 2000


@pytest.mark.parametrize(
    "options", [["-w", "cls"], ["-w", "=3"], ["-f", ""], ["-f", "__key__"], ["-f", "=x"], ["-f", "txt cls"]]
)
def test_first_refuses_when_its_arguments_are_wrong(options: list[str], shard: str) -> None:
    """Status 2, before anything is read."""
    done = run_wds("first", *options, shard)
    assert (done.out, done.status) == (b"", 2)


@pytest.mark.parametrize(("where", "says"), [("png=3", "png"), ("json.label=5", "json")])
def test_first_fails_when_a_condition_cannot_be_told(where: str, says: str, tmp_path: Path) -> None:
    """The sample is named, or told and passed over."""
    members = [
        *sample_members("a", png=b"\xff", json=b"{", txt=b"a"),
        *sample_members("b", png=b"3", json=b'{"label": 5}', txt=b"b"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    done = run_wds("first", "-f", "txt", "-w", where, path)
    assert (done.out, done.status) == (b"", 1)
    assert says in done.err
    assert "'a'" in done.err
    skipped = run_wds("first", "-f", "txt", "-w", where, "--errors", "skip", path)
    assert (skipped.out, skipped.status) == (b"b", 1)


def test_first_evaluates_nothing_when_a_condition_is_a_program(shard: str, tmp_path: Path) -> None:
    """It is compared as text."""
    path = tmp_path / "made"
    done = run_wds("first", "-f", "txt", "-w", f"txt=__import__('pathlib').Path({str(path)!r}).touch()", shard)
    assert done.status == 1
    assert not path.exists()


class Terminal(io.TextIOWrapper):
    """A standard output at which somebody looks."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("field", "status", "out"), [("png", 2, b""), ("txt", 0, b"one dog")])
def test_first_spares_the_terminal_when_the_field_is_binary(
    field: str, status: int, out: bytes, shard: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how to get at it; text is written."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", Terminal(raw))
    assert main(["first", "-f", field, shard]) == status
    assert raw.getvalue() == out
    assert ("binary data to a terminal: use -o FILE" in capsys.readouterr().err) == (status == 2)


SAMPLE: dict[str, Any] = {
    "__key__": "train/0001",
    "__url__": "x.tar",
    "cls": b"3\n",
    "txt": b"two cats\n",
    "json": b'{"label": 7, "name": "cat", "ok": true, "no": null, "boxes": [{"w": 0.5}], "big": 123456789012345678901}',
    "score": b" 0.50 ",
    "wnid": b"n01440764",
    "meta.json": b'{"label": 8}',
    "a.b": b"dotted",
    "jpg": b"\xff\xd8\xff\xe0",
    "pyd": b"\x80\x04N.",
    "index": b"no number",
}

HOLD = [
    "cls=3", "cls==3", "cls = 3", "cls!=4", "cls<4", "cls<=3", "cls>2.5", "cls>=3", "cls=03", "cls=3.0",
    "txt=two cats", "txt~*cat*", "txt!=three", "txt<u", "txt>=two",
    "json.label=7", "json.name=cat", "json.ok=true", "json.no=null", "json.boxes.0.w=0.5", "json.boxes.0.w<1",
    "json.big=123456789012345678901", "json.big>123456789012345678900", 'json.boxes=[{"w":0.5}]',
    "score=0.5", "score<0.6", "score=.5e0", "score>-inf", "wnid=n01440764", "wnid~n014*", "wnid>n0",
    "meta.json.label=8", "a.b=dotted", ".cls=3", "__key__=train/0001", "__key__~train/*", "__url__=x.tar",
    "txt!=3", "cls!=three", "cls~[0-9]",
]  # fmt: skip

FAIL = [
    "cls=4", "cls!=3", "cls<3", "cls>3", "cls=three", "txt=two", "txt~cat", "txt~*CAT*",
    "json.label=8", "json.ok=false", "json.big=123456789012345678900", "score=0.500001",
    "txt<3", "txt>3", "cls<three", "cls>three", "wnid<5",
    "nix=3", "nix!=3", "json.nix=1", "json.nix!=1", "json.boxes.1.w=0.5", "json.boxes.w=0.5", "json.label.x=7",
]  # fmt: skip


@pytest.mark.parametrize("text", HOLD)
def test_condition_holds_when_the_value_is_so(text: str) -> None:
    """Numbers as numbers, text as text, JSON by its path."""
    assert Condition(text).holds(SAMPLE)


@pytest.mark.parametrize("text", FAIL)
def test_condition_fails_when_the_value_is_not_so(text: str) -> None:
    """A missing value and a comparison of a number with text do not match either."""
    assert not Condition(text).holds(SAMPLE)


def test_condition_counts_when_there_is_no_such_value() -> None:
    """A name that was mistyped is found out."""
    condition = Condition("clss=3")
    for _ in range(3):
        condition.holds(SAMPLE)
    assert condition.missed == 3


@pytest.mark.parametrize(
    ("text", "error"), [("jpg=3", SampleError), ("pyd=3", UnsafeDataError), ("index=3", DecodingError)]
)
def test_condition_raises_when_the_field_cannot_be_compared(text: str, error: type[Exception]) -> None:
    """It does not quietly fail: the sample and the field are named."""
    with pytest.raises(error, match=f"{text[:-2]}.*train/0001.*x.tar"):
        Condition(text).holds(SAMPLE)


def test_condition_is_told_when_a_text_is_long_and_almost_a_number() -> None:
    """In one pass over it."""
    assert not Condition("txt<3").holds({"txt": b"1" * 200_000 + b"x"})


def test_condition_raises_when_a_value_would_become_endless() -> None:
    """What torch loads may hold itself, or one thing very often."""
    itself: list[Any] = []
    itself.append(itself)
    often: Any = "x" * (1 << 20)
    for _ in range(30):
        often = [often, often]
    for value in (itself, often):
        with pytest.raises(SampleError, match="cannot be compared"):
            Condition("pth=1").holds({"__key__": "k", "pth": value})


def test_condition_takes_decoded_values_when_given() -> None:
    """Values that are no bytes are taken as they are."""
    assert Condition("cls>=3").holds({"cls": 3})
    assert Condition("json.a.1=x").holds({"json": {"a": ("w", "x")}})
    assert Condition("pth.loss<0.6").holds({"pth": {"loss": torch.tensor(0.5)}})
