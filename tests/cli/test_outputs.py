"""Lists of fields: alternatives, new names, globs, and what becomes of samples without them."""

import pytest

from torchdata_wds.cli.outputs import FieldChoices
from torchdata_wds.errors import DuplicateFieldError, MissingFieldError

SAMPLE = {"__key__": "a", "__url__": "x.tar", "png": b"P", "seg.png": b"S", "cls": b"1", "json": b"{}"}


def test_choices_take_what_the_spec_says() -> None:
    """Besides the chosen fields, a sample keeps its key and URL."""
    for spec, fields in (
        ("png", ["png"]),
        (".png .cls", ["png", "cls"]),
        ("jpg;png cls", ["png", "cls"]),
        ("jpg,png", ["png"]),
        ("image=jpg;png", ["image"]),
        ("image:jpg,png label=cls", ["image", "label"]),
        ("*.png", ["png", "seg.png"]),
        ("seg.*", ["seg.png"]),
        ("__key__ cls", ["cls"]),
    ):
        chosen = FieldChoices(spec).choose(SAMPLE)
        assert chosen is not None
        assert [name for name in chosen if not name.startswith("__")] == fields
        assert (chosen["__key__"], chosen["__url__"]) == ("a", "x.tar")


def test_choices_make_a_field_of_the_key() -> None:
    """Under a new name it is data like any other."""
    assert FieldChoices("name=__key__").choose(SAMPLE) == {"__key__": "a", "__url__": "x.tar", "name": b"a"}


def test_choices_make_rows_of_one_value_per_column() -> None:
    """Columns are called as in the spec, or by the new name."""
    choices = FieldChoices("jpg;png label=cls seg.* __key__ __url__")
    assert choices.columns == ["jpg;png", "label", "seg.*", "__key__", "__url__"]
    assert choices.row(SAMPLE) == [b"P", b"1", b"S", "a", "x.tar"]


def test_choices_raise_when_a_field_is_missing() -> None:
    """The error names the sample and what it has."""
    with pytest.raises(MissingFieldError, match=r"sample 'a' of shard x.tar has no field 'jpg' or 'webp'; it has"):
        FieldChoices("jpg;webp").choose(SAMPLE)
    with pytest.raises(MissingFieldError, match=r"'\*\.txt'"):
        FieldChoices("*.txt").row(SAMPLE)


def test_choices_leave_samples_out_when_asked_to() -> None:
    """They are counted."""
    choices = FieldChoices("cls jpg", missing="skip")
    assert (choices.choose(SAMPLE), choices.row(SAMPLE), choices.left_out) == (None, None, 2)


def test_choices_leave_fields_empty_when_asked_to() -> None:
    """The field has the first of its names; a glob has none to give."""
    choices = FieldChoices("jpg;webp new=old *.txt", missing="empty")
    assert choices.choose(SAMPLE) == {"__key__": "a", "__url__": "x.tar", "jpg": b"", "new": b""}
    assert choices.row(SAMPLE) == [b"", b"", b""]
    assert choices.left_empty == 6


def test_choices_raise_when_two_items_give_one_field() -> None:
    """Neither is silently preferred."""
    with pytest.raises(DuplicateFieldError, match="field 'png'"):
        FieldChoices("png=seg.png *.png").choose(SAMPLE)
    with pytest.raises(DuplicateFieldError, match=r"has 2 fields that match '\*\.png'"):
        FieldChoices("*.png").row(SAMPLE)


@pytest.mark.parametrize(
    "spec", ["", " ", "jpg;", ";jpg", "new=", "=old", ":old", "new=*.jpg", "*.jpg;*.png", "cls cls", "__x__=cls"]
)
def test_choices_refuse_when_the_spec_is_wrong(spec: str) -> None:
    """Before any sample is read."""
    with pytest.raises(ValueError, match="list of fields"):
        FieldChoices(spec)
