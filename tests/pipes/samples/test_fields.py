"""Renaming and mapping the fields of samples, and tuples of them."""

import copy
from typing import Any, Literal

import pytest
import webdataset.filters
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import without_meta
from torchdata_wds import DuplicateFieldError, MissingFieldError, ignore_and_continue
from torchdata_wds.pipes.samples import field_specs

SAMPLES = [
    {"__key__": "a", "__url__": "x.tar", "jpg": b"A", "json": b"{}", "cls": b"1"},
    {"__key__": "b", "__url__": "x.tar", "png": b"B", "json": b"[]", "cls": b"2"},
]
LACKING = {"__key__": "c", "__url__": "x.tar", "txt": b"no picture"}

# Names that are arguments somewhere between the functional form and the loop.
AWKWARD = ["seg.png", "cls", "self", "source", "source_datapipe", "pipe", "func", "fn", "fns", "specs"]
AWKWARD += ["args", "kwargs", "item"]


def samples(*more: dict[str, Any]) -> IterDataPipe[Any]:
    return IterableWrapper([*SAMPLES, *more])


def theirs(stage: Any) -> list[Any]:
    """What a filter of webdataset makes of the samples."""
    return list(stage(iter(copy.deepcopy(SAMPLES))))


def test_wds_rename_equals_webdataset_when_all_samples_have_an_alternative() -> None:
    """The first alternative that is there takes the new name, all named alternatives go, the rest stays."""
    specs = {"image": "jpg;png", "label": ["cls"]}
    assert list(samples().wds_rename(**specs)) == theirs(webdataset.filters.rename(**specs))


@pytest.mark.parametrize("specs", [{"jpg": "png", "png": "jpg"}, {"x": "jpg", "y": "jpg"}, {"jpg": "jpg;png"}])
def test_wds_rename_equals_webdataset_when_names_are_swapped_or_shared(specs: dict[str, str]) -> None:
    """All new values come from the old sample."""
    sample = {"__key__": "a", "jpg": 1, "png": 2}
    assert list(IterableWrapper([sample]).wds_rename(**specs)) == list(
        webdataset.filters.rename(**specs)(iter([dict(sample)]))
    )


def test_wds_rename_keeps_only_metadata_and_new_fields_when_keep_is_false() -> None:
    """Fields that no spec names are left out; unlike webdataset's, __key__ and __url__ stay."""
    ours = list(samples().wds_rename(keep=False, image="jpg;png"))
    assert list(map(without_meta, ours)) == theirs(webdataset.filters.rename(keep=False, image="jpg;png"))
    assert [(sample["__key__"], sample["__url__"]) for sample in ours] == [("a", "x.tar"), ("b", "x.tar")]


def test_wds_rename_keeps_the_key_when_it_is_given_another_name_too() -> None:
    """Metadata always stays: messages further down need it."""
    (sample, _) = samples().wds_rename(id="__key__", image="jpg;png")
    assert (sample["id"], sample["__key__"], sample["image"]) == ("a", "a", b"A")


def test_wds_rename_leaves_the_source_alone() -> None:
    """The samples of the source are not changed."""
    before = [dict(sample) for sample in SAMPLES]
    list(IterableWrapper(SAMPLES, deepcopy=False).wds_rename(image="jpg;png"))
    assert before == SAMPLES


@pytest.mark.parametrize("name", AWKWARD)
def test_fields_may_have_any_name_when_given_as_keywords(name: str) -> None:
    """No argument on the way takes a field's name away."""
    sample = {"__key__": "a", name: "1"}
    assert list(IterableWrapper([sample]).wds_map_dict(**{name: int})) == [{"__key__": "a", name: 1}]
    assert list(IterableWrapper([{"x": 1}]).wds_rename(**{name: "x"})) == [{name: 1}]
    assert list(IterableWrapper([sample]).wds_rename_keys(**{name: name})) == [sample]


def test_field_pipes_raise_when_an_option_was_meant_as_a_field() -> None:
    """`keep` and `handler` are options; the message says how a field gets the name `keep`."""
    for keep in ("jpg", None, 1, ["jpg"]):
        with pytest.raises(TypeError, match=r"wds_rename_keys\(\('keep'"):
            samples().wds_rename(keep=keep, image="jpg")  # type: ignore[arg-type]
    assert next(iter(samples().wds_rename_keys(("keep", "cls"), keep_unselected=True)))["keep"] == b"1"
    for form in ("wds_rename", "wds_rename_keys"):
        with pytest.raises(TypeError, match="handler must be a function"):
            getattr(samples(), form)(handler="jpg", image="jpg")
    with pytest.raises(ValueError, match="at least one function"):
        samples().wds_map_dict(handler=int)


def test_field_pipes_raise_when_an_argument_is_wrong() -> None:
    """Specs, pairs and functions are checked by the constructor, which says what they look like."""
    for spec in ("", "jpg;", ";", 1, None, [], [1], [""], {"jpg"}):
        with pytest.raises(ValueError, match="jpg;png"):
            samples().wds_rename(image=spec)
    wrong: list[tuple[Any, ...]] = [(), ("ab",), (("a", "b", "c"),), (("a",),), (None,), ((1, "b"),), (("a", ""),)]
    for renames in [*wrong, ({"a": "b"},)]:
        with pytest.raises(ValueError, match=r"pairs \(new, glob\)"):
            samples().wds_rename_keys(*renames)
    for function in (None, "int", 3):
        with pytest.raises(TypeError, match="cls="):
            samples().wds_map_dict(cls=function)


@pytest.mark.parametrize(
    ("form", "options", "wanted"),
    [
        ("wds_rename", {"image": "jpg;png"}, "'jpg' or 'png'"),
        ("wds_map_dict", {"jpg": len}, "'jpg'"),
        ("wds_rename_keys", {"image": "*.jpg"}, "'*.jpg'"),
    ],
)
def test_field_pipes_name_the_sample_and_its_fields_when_one_is_missing(
    form: str, options: dict[str, Any], wanted: str
) -> None:
    """The error says which sample of which shard lacks what, and lists what it has."""
    with pytest.raises(MissingFieldError) as caught:
        list(getattr(IterableWrapper([LACKING]), form)(**options))
    assert f"sample 'c' of shard x.tar has no field {wanted}; it has ['txt']" in str(caught.value)
    assert (caught.value.key, caught.value.shard) == ("c", "x.tar")
    assert caught.value.field in ("jpg;png", "jpg", "*.jpg")


def test_field_pipes_mask_secrets_when_they_name_the_shard() -> None:
    """The shard's signature does not reach the message."""
    sample = {"__key__": "a", "__url__": "https://user:secret@host/x.tar?X-Amz-Signature=abcdef", "txt": b""}
    with pytest.raises(MissingFieldError) as caught:
        list(IterableWrapper([sample]).wds_rename(image="jpg"))
    assert "secret" not in str(caught.value)
    assert "abcdef" not in str(caught.value)


def test_field_pipes_say_a_sample_when_it_has_no_key() -> None:
    """Samples of other sources have neither key nor URL."""
    with pytest.raises(MissingFieldError, match=r"a sample has no field 'b'; it has \['a'\]"):
        list(IterableWrapper([{"a": 1}]).wds_map_dict(b=len))


def test_wds_map_dict_equals_webdataset_when_fields_are_there() -> None:
    """Each function gets its field's value; the others stay."""
    options = {"cls": int, "json": bytes.decode}
    assert list(samples().wds_map_dict(**options)) == theirs(webdataset.filters.map_dict(**options))


def test_wds_map_dict_leaves_the_source_alone() -> None:
    """Unlike webdataset's, it makes new samples: a source that keeps its items is not spoilt."""
    kept = [dict(SAMPLES[0])]
    assert next(iter(IterableWrapper(kept, deepcopy=False).wds_map_dict(cls=int)))["cls"] == 1
    assert kept == [SAMPLES[0]]


def test_wds_map_dict_says_which_field_and_sample_when_a_function_raises() -> None:
    """The function's own exception comes through, with a note of the place."""
    with pytest.raises(ValueError, match="invalid literal") as caught:
        list(IterableWrapper([{"__key__": "a", "cls": b"x"}]).wds_map_dict(cls=int))
    assert caught.value.__notes__ == ["wds_map_dict(cls=int) failed at sample 'a'"]


def test_wds_map_dict_takes_lambdas_when_workers_are_forked() -> None:
    """Torch's DataLoader inherits the functions; so they need not pickle."""
    pipe = samples().sharding_filter().wds_map_dict(cls=lambda value: int(value) + 1).wds_to_tuple("cls")
    pipe = pipe.wds_map_tuple(lambda value: value * 10)
    loader = DataLoader(pipe, batch_size=None, num_workers=1, multiprocessing_context="fork", collate_fn=tuple)
    assert list(loader) == [(20,), (30,)]


@pytest.mark.parametrize(
    ("pairs", "globs", "options"),
    [
        ([("image", "[jp][pn]g"), ("label", "cls")], {}, {}),
        ([], {"image": "?[pn]g", "label": "c*"}, {}),
        ([("image", "jpg"), ("image", "png")], {"label": "cls"}, {"must_match": False}),
        ([("image", "?[pn]g")], {}, {"keep_unselected": True}),
        ([("any", "*"), ("image", "?[pn]g")], {}, {"duplicate_is_error": False}),
    ],
)
def test_wds_rename_keys_equals_webdataset_when_fields_match(
    pairs: list[tuple[str, str]], globs: dict[str, str], options: dict[str, Any]
) -> None:
    """Globs choose new names as webdataset's do, the last that matches counting; metadata stays besides."""
    bare = [without_meta(sample) for sample in SAMPLES]
    expected = list(webdataset.filters.rename_keys(*pairs, **globs, **options)(iter(bare)))
    ours = list(samples().wds_rename_keys(*pairs, **globs, **options))
    assert list(map(without_meta, ours)) == expected
    assert [sample["__key__"] for sample in ours] == ["a", "b"]


def test_wds_rename_keys_matches_with_a_leading_dot_when_the_glob_has_one() -> None:
    """`*.png` means png, too."""
    sample = {"png": 1, "seg.png": 2}
    assert list(IterableWrapper([sample]).wds_rename_keys(mask="*.seg.png", image=".png")) == [{"image": 1, "mask": 2}]


def test_wds_rename_keys_raises_when_two_fields_get_one_name() -> None:
    """The error names sample, new name and field; duplicate_is_error=False takes the first."""
    sample = {"__key__": "a", "__url__": "x.tar", "left.png": 1, "right.png": 2}
    with pytest.raises(DuplicateFieldError, match=r"sample 'a' of shard x.tar.*'image', 'right.png' among them"):
        list(IterableWrapper([sample]).wds_rename_keys(image="*.png"))
    (renamed,) = IterableWrapper([sample]).wds_rename_keys(image="*.png", duplicate_is_error=False)
    assert without_meta(renamed) == {"image": 1}


def test_wds_rename_keys_drops_a_new_name_when_must_match_is_false() -> None:
    """A glob without a field is then no error."""
    assert list(IterableWrapper([{"a": 1}]).wds_rename_keys(x="a", y="b", must_match=False)) == [{"x": 1}]


def test_field_pipes_know_their_length_when_no_handler_may_skip() -> None:
    """One sample in is one sample out, unless a handler drops it."""
    assert len(samples().wds_rename(x="jpg")) == len(samples().wds_map_dict(jpg=len)) == 2
    with pytest.raises(TypeError, match="may skip"):
        len(samples().wds_rename(x="jpg", handler=ignore_and_continue))


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
    missing: Literal["skip", "none"], caplog: pytest.LogCaptureFixture
) -> None:
    """Once, at the end of a pass; a field that some samples have is silent."""
    for _ in range(2):
        list(samples().wds_to_tuple("jpg", "jpgg;pngg", missing=missing))
    (message,) = caplog.messages
    assert "wds_to_tuple names 'jpgg;pngg', which none of 2 samples has" in message
    assert not list(IterableWrapper([]).wds_to_tuple("jpg", missing=missing))


def test_wds_to_tuple_warns_in_the_middle_when_a_pass_is_long(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Endless streams have no end to warn at."""
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
