"""Members to samples."""

import logging
from collections import Counter
from typing import Any

import pytest

from torchdata_wds.errors import DuplicateFieldError, ReappearingKeyError, SampleError
from torchdata_wds.format.samples.grouping import group_members, release_whole_samples
from torchdata_wds.format.samples.names import split_name
from torchdata_wds.format.tar.members import FailedMember, Mark, PassedMember, ShardMember


def member(name: str, url: str = "x.tar", visit: int = 0) -> ShardMember:
    """A member whose data is its name."""
    return ShardMember(url, name, name.encode(), visit)


def groups(*items: Any, **options: Any) -> list[tuple[str, list[str]]]:
    """Key and fields of the samples that the items make; a str is the name of a member."""
    members: list[Any] = [member(item) if isinstance(item, str) else item for item in items]
    return [
        (sample["__key__"], [field for field in sample if not field.startswith("__")])
        for sample in group_members(members, **options)
    ]


def test_group_members_makes_samples_of_runs_with_one_key() -> None:
    """Consecutive members with one key are a sample with key, URL and bytes."""
    assert groups("a.jpg", "a.cls", "b.jpg") == [("a", ["jpg", "cls"]), ("b", ["jpg"])]
    (sample,) = group_members([member("d/a.seg.png")])
    assert sample == {"__key__": "d/a", "__url__": "x.tar", "seg.png": b"d/a.seg.png"}


def test_group_members_ends_a_sample_when_the_shard_ends() -> None:
    """The same key in the next shard, or in a second reading of the same shard, is another sample."""
    assert groups(member("a.jpg", "x.tar"), member("a.cls", "y.tar")) == [("a", ["jpg"]), ("a", ["cls"])]
    assert groups(member("a.jpg", visit=1), member("a.jpg", visit=2)) == [("a", ["jpg"]), ("a", ["jpg"])]
    assert groups("a.jpg", Mark.END, "b.cls") == [("a", ["jpg"]), ("b", ["cls"])]


def test_group_members_drops_the_open_sample_when_a_shard_breaks() -> None:
    """Half a sample is never delivered nor merged with what follows."""
    skipped: Counter[str] = Counter()
    items = ["a.jpg", "b.jpg", Mark.BROKEN, member("b.cls", "y.tar")]
    assert groups(*items, skipped=skipped) == [("a", ["jpg"]), ("b", ["cls"])]
    assert skipped["sample cut off by a broken shard"] == 1


def test_group_members_ignores_names_in_between_when_they_belong_to_no_sample() -> None:
    """A README between two members of a sample does not split it."""
    assert groups("a.jpg", "README", "._a.jpg", "a.cls") == [("a", ["jpg", "cls"])]


def test_group_members_raises_when_a_key_comes_back() -> None:
    """A key that comes back later in its shard names shard, member and cure."""
    with pytest.raises(ReappearingKeyError, match=r"tar --sort=name") as caught:
        groups("a.jpg", "b.jpg", "a.cls")
    assert (caught.value.shard, caught.value.member, caught.value.key) == ("x.tar", "a.cls", "a")


def test_group_members_asks_the_handler_when_a_key_comes_back() -> None:
    """Skipping drops the later run only; False ends the stream."""
    names = ("a.jpg", "b.jpg", "a.cls", "c.cls")
    assert groups(*names, on_error=lambda _: True) == [("a", ["jpg"]), ("b", ["jpg"]), ("c", ["cls"])]
    assert groups(*names, on_error=lambda _: False) == [("a", ["jpg"]), ("b", ["jpg"])]


def test_group_members_gives_two_samples_when_reappearing_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    """'allow' is silent, 'warn' logs; both give each run as a sample."""
    expected = [("a", ["jpg"]), ("b", ["jpg"]), ("a", ["cls"])]
    with caplog.at_level(logging.WARNING):
        assert groups("a.jpg", "b.jpg", "a.cls", on_reappearing="allow") == expected
        assert not caplog.records
        assert groups("a.jpg", "b.jpg", "a.cls", on_reappearing="warn") == expected
    assert "comes back" in caplog.text


def test_group_members_forgets_keys_when_a_shard_is_read_again() -> None:
    """A key may come in every shard and in every reading of one."""
    assert len(groups(*(member("a.jpg", visit=visit) for visit in range(3)))) == 3


def test_group_members_raises_when_a_field_comes_twice() -> None:
    """The error names both members."""
    with pytest.raises(DuplicateFieldError, match=r"members a\.JPG and a\.jpg.*lowercase=False") as caught:
        groups("a.JPG", "a.jpg")
    assert (caught.value.key, caught.value.field) == ("a", "jpg")


def test_group_members_takes_one_when_duplicates_are_allowed() -> None:
    """'first' and 'last' choose."""
    for choice, data in (("first", b"a.JPG"), ("last", b"a.jpg")):
        (sample,) = group_members([member("a.JPG"), member("a.jpg")], on_duplicate=choice)  # type: ignore[arg-type]
        assert sample["jpg"] == data


def test_group_members_drops_the_whole_sample_when_a_duplicate_is_skipped() -> None:
    """No part of a sample that is wrong comes through."""
    names = ("a.jpg", "a.jpg", "a.cls", "b.jpg")
    assert groups(*names, on_error=lambda error: True) == [("b", ["jpg"])]


def test_group_members_keeps_chosen_fields_when_asked() -> None:
    """fields= keeps those; a sample without any is dropped and counted."""
    skipped: Counter[str] = Counter()
    assert groups("a.JPG", "a.cls", "b.txt", fields="jpg png", skipped=skipped) == [("a", ["jpg"])]
    assert skipped == {"sample without the chosen fields": 1}
    assert groups("a.jpg", "a.cls", fields=["cls"]) == [("a", ["cls"])]


def test_group_members_says_what_is_valid_when_an_option_is_wrong() -> None:
    """Wrong options raise before anything is read."""
    wrong = {"on_duplicate": ["both"], "on_reappearing": [None], "fields": [[], ""], "keys": ["x"]}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        with pytest.raises(ValueError, match=f"{name} must"):
            group_members([], **{name: value})  # type: ignore[arg-type]


def test_group_members_passes_on_what_a_handler_raises() -> None:
    """Only SampleErrors reach the handler, and what it raises comes out."""

    def handler(error: Exception) -> bool:
        raise KeyError("mine") from error

    with pytest.raises(KeyError, match="mine"):
        groups("a.__key__", on_error=handler)
    with pytest.raises(SampleError):
        groups("a.__key__")


def test_release_whole_samples_waits_when_a_sample_is_open() -> None:
    """Members come once the next key or an end mark has been seen, and not at all once the shard broke."""
    items = [member("a.jpg"), member("a.cls"), member("b.jpg"), Mark.END, member("c.jpg"), member("d.jpg"), Mark.BROKEN]
    assert [item.name for item in release_whole_samples(items, split_name)] == ["a.jpg", "a.cls", "b.jpg", "c.jpg"]


def test_release_whole_samples_keeps_the_order_when_names_belong_to_no_sample() -> None:
    """Members without key stay where they are, and pass at once where no sample is open."""
    names = ["README", "a.jpg", "NOTES", "a.cls", "b.jpg"]
    source = iter([*map(member, names), Mark.END])
    released = release_whole_samples(source, split_name)
    assert next(released).name == "README"
    assert [item.name for item in released] == ["a.jpg", "NOTES", "a.cls", "b.jpg"]


def test_release_whole_samples_asks_when_splitting_a_name_fails() -> None:
    """What keys= raises goes to the handler: the member is left out, or the stream ends."""

    def split(name: str) -> tuple[str, str] | None:
        return {"a.jpg": ("a", "jpg"), "b.jpg": ("b", "jpg")}[name]

    items = [member("a.jpg"), member("odd"), member("b.jpg"), Mark.END]
    assert [item.name for item in release_whole_samples(items, split, lambda error: True)] == ["a.jpg", "b.jpg"]
    assert [item.name for item in release_whole_samples(items, split, lambda error: False)] == []
    assert groups("a.jpg", "odd", "b.jpg", keys=split, on_error=lambda error: True) == [("a", ["jpg"]), ("b", ["jpg"])]
    with pytest.raises(KeyError):
        groups("a.jpg", "odd", keys=split)


def test_release_whole_samples_waits_when_a_sample_goes_on_behind_a_member_left_out() -> None:
    """A member of another key in between closes a sample only until the sample goes on."""
    items = [member("a.jpg"), PassedMember("b.txt"), member("a.cls"), Mark.BROKEN]
    assert list(release_whole_samples(items, split_name)) == []
    assert [item.name for item in release_whole_samples([*items[:3], Mark.END], split_name)] == ["a.jpg", "a.cls"]


def test_group_members_knows_the_end_of_a_sample_when_members_are_passed_over() -> None:
    """A name that is not delivered still ends the sample before it, should the shard break there."""
    items = ["a.jpg", PassedMember("a.cls"), PassedMember("b.jpg"), Mark.BROKEN]
    assert groups(*items) == [("a", ["jpg"])]
    assert groups("a.jpg", PassedMember("a.cls"), Mark.BROKEN) == []
    assert groups("a.jpg", PassedMember("b.txt"), "a.cls") == [("a", ["jpg", "cls"])]
    assert groups("a.jpg", PassedMember("b.txt"), "a.cls", Mark.BROKEN) == []


def test_group_members_drops_the_sample_when_one_of_its_members_failed() -> None:
    """A member that could not be read makes its sample wrong, and no other."""
    items = ["a.jpg", FailedMember("x.tar", "a.cls", OSError("gone")), "b.jpg"]
    assert groups(*items, on_error=lambda error: True) == [("b", ["jpg"])]
    with pytest.raises(OSError, match="gone"):
        groups(*items)


def test_group_members_takes_field_names_as_users_write_them() -> None:
    """Blanks or semicolons, leading dots and case are fine."""
    for fields in ("jpg;cls", ".JPG CLS", ["jpg", ".cls"], iter(["jpg", "cls"])):
        assert groups("a.JPG", "a.cls", "a.txt", fields=fields) == [("a", ["jpg", "cls"])]
