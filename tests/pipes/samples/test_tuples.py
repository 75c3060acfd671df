"""Samples to tuples, and tuples through functions."""

import copy
from typing import Any, Literal

import pytest
import webdataset.filters
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import DuplicateFieldError, MissingFieldError, handlers, ignore_and_continue
from torchdata_wds.pipes.samples import field_specs

SAMPLES = [
    {"__key__": "a", "__url__": "x.tar", "jpg": b"A", "json": b"{}", "cls": b"1"},
    {"__key__": "b", "__url__": "x.tar", "png": b"B", "json": b"[]", "cls": b"2"},
]
LACKING = {"__key__": "c", "__url__": "x.tar", "txt": b"no picture"}


def samples() -> IterDataPipe[Any]:
    return IterableWrapper(SAMPLES)


def theirs(stage: Any) -> list[Any]:
    """What a filter of webdataset makes of the samples."""
    return list(stage(iter(copy.deepcopy(SAMPLES))))


@pytest.mark.parametrize(
    "specs",
    [
        ("jpg;png", "cls"),
        ("jpg;png cls",),
        ("  jpg;png   json cls ",),
        ("__key__", "jpg;png", "json"),
        ("__key__ __url__ cls",),
        ("cls", "cls"),
        (["jpg", "png"], "cls"),
        ("cls",),
    ],
)
def test_wds_to_tuple_equals_webdataset_when_fields_are_there(specs: tuple[Any, ...]) -> None:
    """Specs by position or in one str, alternatives in order, metadata as fields."""
    assert list(samples().wds_to_tuple(*specs)) == theirs(webdataset.filters.to_tuple(*specs))


@pytest.mark.parametrize("missing", ["skip", "none"])
def test_wds_to_tuple_warns_when_no_sample_has_an_optional_field(
    missing: Literal["skip", "none"], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, at the end of a pass; a field that some samples have is silent."""
    monkeypatch.setattr(handlers, "_said", set())
    for _ in range(2):
        list(samples().wds_to_tuple("jpg", "jpgg;pngg", missing=missing))
    (message,) = caplog.messages
    assert "wds_to_tuple names 'jpgg;pngg', which none of 2 samples has" in message
    assert not list(IterableWrapper([]).wds_to_tuple("jpg", missing=missing))


def test_wds_to_tuple_warns_in_the_middle_when_a_pass_is_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Endless streams have no end to warn at."""
    monkeypatch.setattr(handlers, "_said", set())
    monkeypatch.setattr(field_specs, "ENOUGH_SAMPLES", 2)
    taken = iter(IterableWrapper(SAMPLES * 2).wds_to_tuple("jpgg", missing="none"))
    next(taken)
    assert not caplog.messages
    next(taken)
    assert "none of 2 samples" in caplog.text


def test_wds_to_tuple_takes_the_first_alternative_when_several_are_there() -> None:
    """Alternatives count in their own order, not in the sample's."""
    both = IterableWrapper([{"png": 1, "jpg": 2}])
    assert list(both.wds_to_tuple("jpg;png")) == [(2,)]
    assert list(both.wds_to_tuple("png;jpg")) == [(1,)]


def test_wds_to_tuple_keeps_values_that_are_false_when_they_are_there() -> None:
    """None, 0 and empty bytes are values, not missing fields."""
    for missing in ("error", "skip", "none"):
        assert list(
            IterableWrapper([{"a": None, "b": 0, "c": b""}]).wds_to_tuple("a;x", "b", "c", missing=missing)
        ) == [(None, 0, b"")]


def test_wds_to_tuple_lists_the_fields_when_one_is_missing() -> None:
    """The error names the sample, the alternatives and what is there, without metadata."""
    with pytest.raises(MissingFieldError) as caught:
        list(IterableWrapper([LACKING]).wds_to_tuple("txt", "jpg;png"))
    assert "sample 'c' of shard x.tar has no field 'jpg' or 'png'; it has ['txt']." in str(caught.value)
    assert (caught.value.shard, caught.value.key, caught.value.field) == ("x.tar", "c", "jpg;png")
    assert "dot" not in str(caught.value)


def test_wds_to_tuple_hints_at_dots_when_a_field_ends_in_the_name() -> None:
    """A file such as 1.5.jpg has the field 5.jpg: the commonest surprise of the format."""
    with pytest.raises(MissingFieldError) as caught:
        list(IterableWrapper([{"__key__": "1", "__url__": "x.tar", "5.jpg": b""}]).wds_to_tuple("jpg"))
    assert "more than one dot (field '5.jpg')" in str(caught.value)
    assert "group_by_key(keys='last_dot')" in str(caught.value)


def test_wds_to_tuple_equals_webdataset_when_missing_is_none() -> None:
    """None stands in for what is not there."""
    assert list(samples().wds_to_tuple("jpg", "cls", missing="none")) == theirs(
        webdataset.filters.to_tuple("jpg", "cls", missing_is_error=False)
    )


def test_wds_to_tuple_drops_and_counts_samples_when_missing_is_skip() -> None:
    """A sample without the field goes; the handler is not asked."""
    pipe = IterableWrapper([SAMPLES[0], LACKING, SAMPLES[1]]).wds_to_tuple("__key__", "jpg;png", missing="skip")
    assert list(pipe) == [("a", b"A"), ("b", b"B")]
    assert sum(pipe.skipped.values()) == 1
    with pytest.raises(TypeError, match="length"):
        len(pipe)


def test_tuple_pipes_raise_when_an_argument_is_wrong() -> None:
    """The constructor refuses missing choices, specs, patterns and functions, and says what is valid."""
    for missing in ("ignore", True, None, "None"):
        with pytest.raises(ValueError, match="'error', 'skip', 'none'"):
            samples().wds_to_tuple("jpg", missing=missing)  # type: ignore[arg-type]
    wrong_specs: list[tuple[Any, ...]] = [(), ("",), ("  ",), ("jpg", ""), ("jpg;",), (1,), (None, "jpg"), ([],)]
    for specs in wrong_specs:
        with pytest.raises(ValueError, match="jpg;png"):
            samples().wds_to_tuple(*specs)
    for patterns in ((), ("",), (1,), ([],)):
        with pytest.raises(ValueError, match=r"pattern|spec"):
            samples().wds_extract_keys(*patterns)
    for function in ("int", 3, [int]):
        with pytest.raises(TypeError, match="functions or None"):
            IterableWrapper([]).wds_map_tuple(function)


@pytest.mark.parametrize("form", ["wds_to_tuple", "wds_extract_keys"])
def test_tuple_pipes_raise_when_an_item_is_no_sample(form: str) -> None:
    """Tuples have no fields any more."""
    with pytest.raises(TypeError, match=f"{form} got tuple"):
        list(getattr(IterableWrapper([(1, 2)]), form)("jpg"))


@pytest.mark.parametrize("functions", [(), (None,), (int,), (None, len), (int, None), (int, len)])
def test_wds_map_tuple_equals_webdataset_when_tuples_are_long_enough(functions: tuple[Any, ...]) -> None:
    """None and places behind the last function leave values as they are."""
    tuples = [("1", "ab"), ("2", "")]
    assert list(IterableWrapper(tuples).wds_map_tuple(*functions)) == list(
        webdataset.filters.map_tuple(*functions)(iter(tuples))
    )


def test_wds_map_tuple_gives_tuples_when_items_are_lists() -> None:
    """A list is read as a tuple, and not changed."""
    items = [["1", "x"]]
    assert list(IterableWrapper(items, deepcopy=False).wds_map_tuple(int)) == [(1, "x")]
    assert items == [["1", "x"]]


def test_wds_map_tuple_raises_when_an_item_is_no_tuple_or_too_short() -> None:
    """Samples and strings are refused; more functions than values is a mistake, not a reason to leave one out."""
    for item in ({"jpg": 1}, "text", 3, None):
        with pytest.raises(TypeError, match=f"got {type(item).__name__}.*wds_to_tuple"):
            list(IterableWrapper([item]).wds_map_tuple(None))
    with pytest.raises(ValueError, match="2 functions for a tuple of 1 values"):
        list(IterableWrapper([(1,)]).wds_map_tuple(None, int))


def test_wds_map_tuple_shows_its_functions_when_printed_in_an_exception() -> None:
    """Torch's note of the pipe shows the functions, not the holder."""
    with pytest.raises(ValueError, match=r"fns=.*int") as caught:
        list(IterableWrapper([("x",)]).wds_map_tuple(int))
    assert "Held" not in str(caught.value)


@pytest.mark.parametrize(
    ("patterns", "options"),
    [
        (("?[pn]g", "cls"), {}),
        (("*.jpg;*.png", "*.cls"), {}),
        ((["*.jpg", "*.png"],), {}),
        (("jpg", "cls"), {"ignore_missing": True}),
        (("j*;p*", "cls"), {"duplicate_is_error": False}),
        (("__key__", "cls"), {}),
        (("__url__;__none__",), {}),
    ],
)
def test_wds_extract_keys_equals_webdataset_when_fields_match(
    patterns: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Globs, with or without a leading dot, choose fields as webdataset's do; metadata by its full name."""
    assert list(samples().wds_extract_keys(*patterns, **options)) == theirs(
        webdataset.filters.extract_keys(*patterns, **options)
    )


def test_wds_extract_keys_leaves_metadata_out_when_a_glob_would_match_it() -> None:
    """`*` means the fields of the shard."""
    assert list(IterableWrapper([{"__key__": "a", "txt": 1}]).wds_extract_keys("*")) == [(1,)]


def test_wds_extract_keys_raises_when_several_fields_match() -> None:
    """The error names the fields; duplicate_is_error=False takes the first."""
    pipe = IterableWrapper([{"__key__": "a", "__url__": "x.tar", "l.png": 1, "r.png": 2}])
    with pytest.raises(DuplicateFieldError, match=r"\['l.png', 'r.png'\] of sample 'a' of shard x.tar"):
        list(pipe.wds_extract_keys("*.png"))
    assert list(pipe.wds_extract_keys("*.png", duplicate_is_error=False)) == [(1,)]


def test_tuple_pipes_know_their_length_when_nothing_may_be_skipped() -> None:
    """One sample in is one tuple out."""
    assert len(samples().wds_to_tuple("cls")) == len(samples().wds_to_tuple("cls", missing="none")) == 2
    with pytest.raises(TypeError):
        len(samples().wds_to_tuple("cls", handler=ignore_and_continue))
