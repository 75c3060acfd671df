"""Renaming and mapping the fields of samples."""

import copy
from typing import Any

import pytest
import webdataset.filters
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import without_meta
from torchdata_wds import DuplicateFieldError, MissingFieldError, ignore_and_continue

SAMPLES = [
    {"__key__": "a", "__url__": "x.tar", "jpg": b"A", "json": b"{}", "cls": b"1"},
    {"__key__": "b", "__url__": "x.tar", "png": b"B", "json": b"[]", "cls": b"2"},
]
LACKING = {"__key__": "c", "__url__": "x.tar", "txt": b"no picture"}

# Names that are arguments somewhere between the functional form and the loop.
AWKWARD = [
    "seg.png",
    "cls",
    "self",
    "source",
    "source_datapipe",
    "pipe",
    "func",
    "fn",
    "fns",
    "specs",
    "args",
    "kwargs",
    "item",
]


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


@pytest.mark.parametrize("item", [("jpg", 1), "text", None, b"", [1]])
@pytest.mark.parametrize(
    ("form", "options"),
    [("wds_rename", {"image": "jpg"}), ("wds_map_dict", {"jpg": len}), ("wds_rename_keys", {"image": "jpg"})],
)
def test_field_pipes_raise_when_an_item_is_no_sample(form: str, options: dict[str, Any], item: Any) -> None:
    """A tuple means that the stages stand in the wrong order; the message says so."""
    with pytest.raises(TypeError, match=f"{form} got {type(item).__name__}.*before .wds_to_tuple"):
        list(getattr(IterableWrapper([item]), form)(**options))


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
