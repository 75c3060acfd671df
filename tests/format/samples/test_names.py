"""Every row of the name table of the format."""

from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchdata_wds.errors import SampleError
from torchdata_wds.format.headers import text
from torchdata_wds.format.samples.grouping import group_members
from torchdata_wds.format.samples.names import RESERVED_FIELDS, key_splitter, skip_reason, split_name, split_names
from torchdata_wds.format.tar.members import ShardMember

SPLIT = {
    "a.jpg": ("a", "jpg"),
    "./d/a.b.c.json": ("d/a", "b.c.json"),
    "d.v1/a.jpg": ("d.v1/a", "jpg"),
    "train.v1/22.0/1.1.png": ("train.v1/22.0/1", "1.png"),
    "a..jpg": ("a", ".jpg"),
    "a\\b.jpg": ("a\\b", "jpg"),
    "/abs/a.jpg": ("/abs/a", "jpg"),
    "../a.jpg": ("../a", "jpg"),
    "d/__x__.jpg": ("d/__x__", "jpg"),
    "__meta__.json": ("__meta__", "json"),
    "ä ö.jpg": ("ä ö", "jpg"),
    "__a.jpg": ("__a", "jpg"),
}
SKIPPED = {
    "d.v1/README": "no extension",
    "a.": "empty extension",
    ".hidden": "hidden file",
    "d/.hidden.jpg": "hidden file",
    "d/._a.jpg": "macOS metadata",
    "__MACOSX/d/a.jpg": "macOS metadata",
    ".DS_Store": "macOS metadata",
    "d/.DS_Store": "macOS metadata",
    "__index__": "metadata",
    "__meta__/x.json": "metadata",
    "": "no extension",
}


def test_split_name_gives_key_and_field_when_there_is_an_extension() -> None:
    """The key ends at the first dot of the base name, folders and all."""
    assert {name: split_name(name) for name in SPLIT} == SPLIT


def test_split_name_skips_and_counts_when_a_name_belongs_to_no_sample() -> None:
    """Names without extension, hidden files and metadata are skipped, each counted by its reason."""
    for name, reason in SKIPPED.items():
        skipped: Counter[str] = Counter()
        assert split_name(name) is None
        assert list(group_members([ShardMember("x.tar", name, b"")], skipped=skipped)) == []
        assert skipped == {skip_reason(name): 1} == {reason: 1}


@given(
    st.lists(
        st.sampled_from([*SPLIT, *SKIPPED, "b.txt", "d/b.txt", "a.b/c", "\n.txt", "./é.txt"]), min_size=1, max_size=4
    )
)
@example(["a.txt", "b.cls"])
@example(["d/a.txt", "d/b.cls"])
@example(["d/a.txt", "d.b/c"])
def test_split_names_splits_each_name_as_split_name_does(names: list[str]) -> None:
    """Or gives nothing, where one of them belongs to no sample."""
    pairs = [split_name(name) for name in names]
    columns = split_names(names, split_name)
    assert (columns is None) == (None in pairs)
    assert columns is None or list(zip(*columns, strict=True)) == pairs


def test_group_members_lowers_fields_when_not_told_otherwise() -> None:
    """Fields are lower-cased, keys never."""
    for name, parts in {"A.JPG": ("A", "jpg"), "a.Seg.PNG": ("a", "seg.png")}.items():
        (sample,) = group_members([ShardMember("x.tar", name, b"1")])
        assert (sample["__key__"], list(sample)[2]) == parts
        (sample,) = group_members([ShardMember("x.tar", name, b"1")], lowercase=False)
        assert list(sample)[2] == name.partition(".")[2]


def test_group_members_refuses_a_reserved_field_when_a_member_has_its_name() -> None:
    """A member a.__key__ would overwrite what the library sets: an error with shard and member."""
    for field in (*sorted(RESERVED_FIELDS), "__KEY__"):
        with pytest.raises(SampleError, match="field '__") as caught:
            list(group_members([ShardMember("x.tar", f"a.{field}", b"evil")]))
        assert (caught.value.shard, caught.value.member, caught.value.key) == ("x.tar", f"a.{field}", "a")


def test_text_stays_usable_when_name_bytes_are_not_utf8() -> None:
    """Bytes that are no UTF-8 become backslash escapes, which print, compare and encode everywhere."""
    name = text(b"caf\xe9.txt")
    assert name == "caf\\xe9.txt"
    assert name.encode("utf-8").decode("ascii") == name


def test_key_splitter_cuts_at_the_last_dot_when_asked() -> None:
    """Dots stay in the key; hidden files, metadata and names without extension are skipped as by every rule."""
    split = key_splitter("last_dot")
    parts = {"a.b.c.json": ("a.b.c", "json"), "./d.1/a.jpg": ("d.1/a", "jpg"), "a..jpg": ("a.", "jpg")}
    none = dict.fromkeys(["README", "d.v1/README", ".hidden", "a.b.", "__meta__/x.json"])
    assert {name: split(name) for name in (*parts, *none)} == {**parts, **none}


def test_key_splitter_takes_a_function_when_given_one() -> None:
    """A callable decides alone, about hidden names too; what is no pair of str is a programming error."""
    split = key_splitter(lambda name: ("k", name) if name != "skip.me" else None)
    assert split(".hidden") == ("k", ".hidden")
    assert split("skip.me") is None
    for answer in (("a",), "ab", ("a", 1), True):
        with pytest.raises(TypeError, match="must return a tuple"):
            key_splitter(lambda name, answer=answer: answer)("a.jpg")  # type: ignore[arg-type, misc]


def test_key_splitter_says_what_is_valid_when_the_rule_is_unknown() -> None:
    """An unknown rule names the valid ones."""
    for keys in ("middle_dot", 3, None):
        with pytest.raises(ValueError, match="'first_dot', 'last_dot'"):
            key_splitter(keys)  # type: ignore[arg-type]
