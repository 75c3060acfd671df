"""Every row of the name table of the format."""

import pytest

from tests.kits.shards import tar_bytes
from torchdata_wds.errors import SampleError
from torchdata_wds.format import ShardMember, group_members
from torchdata_wds.format.samples.names import RESERVED_FIELDS, key_splitter, skip_reason, split_name
from torchdata_wds.format.tar.entries import TarEntries
from torchdata_wds.format.tar.headers import text

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


@pytest.mark.parametrize(("name", "parts"), SPLIT.items())
def test_split_name_gives_key_and_field_when_there_is_an_extension(name: str, parts: tuple[str, str]) -> None:
    """The key ends at the first dot of the base name, folders and all."""
    assert split_name(name) == parts


@pytest.mark.parametrize(("name", "reason"), SKIPPED.items())
def test_split_name_skips_and_counts_when_a_name_belongs_to_no_sample(name: str, reason: str) -> None:
    """Names without extension, hidden files and metadata are skipped, each counted by its reason."""
    from collections import Counter

    skipped: Counter[str] = Counter()
    assert split_name(name) is None
    assert list(group_members([ShardMember("x.tar", name, b"")], skipped=skipped)) == []
    assert skipped == {skip_reason(name): 1} == {reason: 1}


@pytest.mark.parametrize(("name", "parts"), {"A.JPG": ("A", "jpg"), "a.Seg.PNG": ("a", "seg.png")}.items())
def test_group_members_lowers_fields_when_not_told_otherwise(name: str, parts: tuple[str, str]) -> None:
    """Fields are lower-cased, keys never."""
    (sample,) = group_members([ShardMember("x.tar", name, b"1")])
    assert (sample["__key__"], list(sample)[2]) == parts
    (sample,) = group_members([ShardMember("x.tar", name, b"1")], lowercase=False)
    assert list(sample)[2] == name.partition(".")[2]


@pytest.mark.parametrize("field", [*sorted(RESERVED_FIELDS), "__KEY__"])
def test_group_members_refuses_a_reserved_field_when_a_member_has_its_name(field: str) -> None:
    """A member a.__key__ would overwrite what the library sets: an error with shard and member."""
    with pytest.raises(SampleError, match="field '__") as caught:
        list(group_members([ShardMember("x.tar", f"a.{field}", b"evil")]))
    assert (caught.value.shard, caught.value.member, caught.value.key) == ("x.tar", f"a.{field}", "a")


def test_text_stays_usable_when_name_bytes_are_not_utf8() -> None:
    """Bytes that are no UTF-8 become backslash escapes, which print, compare and encode everywhere."""
    name = text(b"caf\xe9.txt")
    assert name == "caf\\xe9.txt"
    assert name.encode("utf-8").decode("ascii") == name


def test_entries_decode_names_when_they_are_not_utf8() -> None:
    """A Latin-1 name in a ustar header arrives escaped."""
    archive = bytearray(tar_bytes([("caf?.txt", b"x")]))
    archive[3] = 0xE9
    archive[148:156] = b"%06o\0 " % (sum(archive[:148]) + sum(archive[156:512]) + 256)
    import io

    entry = next(iter(TarEntries(io.BytesIO(bytes(archive)), "x.tar")))
    assert entry is not None
    assert entry.name == "caf\\xe9.txt"


LAST_DOT = {"a.b.c.json": ("a.b.c", "json"), "./d.1/a.jpg": ("d.1/a", "jpg"), "a..jpg": ("a.", "jpg")}


@pytest.mark.parametrize(("name", "parts"), LAST_DOT.items())
def test_key_splitter_cuts_at_the_last_dot_when_asked(name: str, parts: tuple[str, str]) -> None:
    """keys='last_dot' keeps dots in the key."""
    assert key_splitter("last_dot")(name) == parts


@pytest.mark.parametrize("name", ["README", "d.v1/README", ".hidden", "a.b.", "__meta__/x.json"])
def test_key_splitter_skips_the_same_names_when_cutting_at_the_last_dot(name: str) -> None:
    """Hidden files, metadata and names without extension are skipped by every rule."""
    assert key_splitter("last_dot")(name) is None


def test_key_splitter_takes_a_function_when_given_one() -> None:
    """A callable decides alone, about hidden names too."""
    split = key_splitter(lambda name: ("k", name) if name != "skip.me" else None)
    assert split(".hidden") == ("k", ".hidden")
    assert split("skip.me") is None


@pytest.mark.parametrize("answer", [("a",), "ab", ("a", 1), True])
def test_key_splitter_refuses_when_a_function_gives_no_pair(answer: object) -> None:
    """A callable that returns anything but a pair of str or None is a programming error that says what to return."""
    with pytest.raises(TypeError, match="must return a tuple"):
        key_splitter(lambda name: answer)("a.jpg")  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("keys", ["middle_dot", 3, None])
def test_key_splitter_says_what_is_valid_when_the_rule_is_unknown(keys: object) -> None:
    """An unknown rule names the valid ones."""
    with pytest.raises(ValueError, match="'first_dot', 'last_dot'"):
        key_splitter(keys)  # type: ignore[arg-type]
