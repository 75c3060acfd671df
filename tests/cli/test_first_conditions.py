"""Conditions on samples."""

from typing import Any

import pytest
import torch

from torchdata_wds.cli.first import Condition
from torchdata_wds.errors import DecodingError, SampleError, UnsafeDataError

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
    """Also where there is no such value, and where a number would be compared with text."""
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
