"""What samples are sorted by."""

import itertools
import math
from argparse import Namespace
from typing import Any

import pytest

from torchdata_wds.cli.command import UsageError
from torchdata_wds.cli.sort import SortKey
from torchdata_wds.errors import DecodingError, MissingFieldError


def sort_key(field: str = "__key__", kind: str = "text", *, seed: int = 0, **others: Any) -> SortKey:
    """The key that the program's arguments ask for."""
    return SortKey(Namespace(key=field, type=kind, **{"missing": "error", "reverse": False, **others}), seed)


def sample(key: str = "a", **fields: bytes) -> dict[str, Any]:
    """A sample of a shard."""
    return {"__key__": key, "__url__": "https://me:secret@host/x.tar", **fields}


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        ("text", b" 7\n", b" 7\n"),
        ("text", b"\xff\x00", b"\xff\x00"),
        ("int", b"7", 7),
        ("int", b" -12\n", -12),
        ("int", b"\xef\xbb\xbf+3", 3),
        ("int", b"0" * 50 + b"5", 5),
        ("float", b"-1.5e3\n", -1500.0),
        ("float", b"7", 7.0),
        ("float", b"inf", math.inf),
        ("float", b" -Infinity", -math.inf),
        ("float", b"1e999", math.inf),
    ],
)
def test_values_are_read_by_their_kind(kind: Any, data: bytes, expected: object) -> None:
    """Blanks and a byte order mark around numbers are fine."""
    assert sort_key("cls", kind)(sample(cls=data)) == expected


@pytest.mark.parametrize("zeros", [100, 4999])
def test_integers_have_no_limit(zeros: int) -> None:
    """Also beyond the digits that int() takes of a text."""
    data = b"1" + b"0" * (zeros - 1) + b"1"
    assert sort_key("cls", "int")(sample(cls=data)) == 10**zeros + 1
    assert sort_key("cls", "int")(sample(cls=b"-" + data)) == -(10**zeros) - 1


def test_integers_of_very_many_digits_are_not_reckoned_with() -> None:
    """Turned into integers of the machine, these would take minutes."""
    values = [b"1" * 2_000_000, b"7", b"-" + b"1" * 2_000_000, b"1" * 1_999_999 + b"0", b"-7"]
    found = sorted(values, key=lambda data: sort_key("cls", "int")(sample(cls=data)))
    assert found == [values[number] for number in (2, 4, 1, 3, 0)]


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("int", b""),
        ("int", b"seven"),
        ("int", b"7.0"),
        ("int", b"1_000"),
        ("int", "٣".encode()),
        ("int", b"--7"),
        ("int", b"0x10"),
        ("float", b"nan"),
        ("float", b"-NaN"),
        ("float", b""),
        ("float", b"1_0"),
        ("float", b"1,5"),
        ("float", b"\xff"),
        ("float", b"x" * 5000),
    ],
)
def test_values_that_have_no_place_in_the_order_are_errors_that_name_it(kind: Any, data: bytes) -> None:
    """Sample, shard without its secret, field, and what was found, not all of it."""
    with pytest.raises(DecodingError, match="cannot be sorted by field 'cls'") as caught:
        sort_key("cls", kind)(sample("k/1", cls=data))
    error = caught.value
    assert (error.key, error.field, error.shard) == ("k/1", "cls", "https://me:***@host/x.tar")
    assert "'k/1'" in str(error)
    assert "secret" not in str(error)
    assert repr(data[:40]) in str(error)
    assert len(str(error)) < 400


def test_text_is_ordered_by_code_points() -> None:
    """Fields and keys alike: UTF-8 sorts by its bytes as text does by its characters."""
    edges = "\0\t aZ\x7f\x80\u07ff\u0800\ud7ff\ud800\udcff\ue000\uffff\U00010000\U0010ffff"
    texts = ["".join(letters) for length in (2, 0, 1) for letters in itertools.product(edges[::-1], repeat=length)]
    by_field = sort_key("txt")
    by_key = sort_key()
    expected = sorted(texts)
    assert sorted(texts, key=lambda text: by_field(sample(txt=text.encode("utf-8", "surrogatepass")))) == expected
    assert sorted(texts, key=lambda text: by_key(sample(text))) == expected


def test_first_of_several_fields_counts() -> None:
    """As in lists of fields; a leading dot is that of a file's name."""
    value = sort_key(".cls;label", "int")
    assert value(sample(label=b"1", cls=b"2")) == 2
    assert value(sample(label=b"1")) == 1


def test_missing_field_is_an_error_that_says_what_there_is() -> None:
    """Not a place at either end."""
    with pytest.raises(MissingFieldError, match=r"sample 'a' .* has no field 'cls' or 'label'; it has \['txt'\]"):
        sort_key("cls;label")(sample(txt=b""))


def test_missing_field_leaves_a_sample_out_when_asked() -> None:
    """And counts it."""
    value = sort_key("cls", missing="skip")
    assert [value(sample()), value(sample(cls=b"1")), value(sample())] == [None, b"1", None]
    assert value.left_out == 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["text", "int", "float", "shuffle"])
def test_missing_field_comes_last_when_asked(kind: Any, reverse: bool) -> None:
    """Whichever way the sort goes; those without keep their order."""
    value = sort_key("cls", kind, missing="last", reverse=reverse)
    samples = [sample("a"), sample("b", cls=b"1"), sample("c"), sample("d", cls=b"2"), sample("e", cls=b"1")]
    keys = [found["__key__"] for found in sorted(samples, key=value, reverse=reverse)]
    assert keys[3:] == ["a", "c"]
    if kind != "shuffle":
        assert keys[:3] == (["d", "b", "e"] if reverse else ["b", "e", "d"])


def shuffled(samples: list[dict[str, Any]], field: str = "__key__", seed: int = 0) -> list[str]:
    """The keys in the order of a shuffle."""
    return [found["__key__"] for found in sorted(samples, key=sort_key(field, "shuffle", seed=seed))]


def test_shuffle_depends_on_seed_and_keys_alone() -> None:
    """Not on the order in which the samples come, nor on Python's hashes."""
    samples = [sample(f"{number:02d}", cls=b"1") for number in range(30)]
    first = shuffled(samples)
    assert sorted(first) == [f"{number:02d}" for number in range(30)]
    assert first != sorted(first)
    assert shuffled(samples[::-1]) == first
    assert shuffled(samples, seed=1) != first
    assert shuffled(samples, seed=10**100) != first
    # the order is part of what a seed promises
    assert first[:5] == FIRST_OF_SEED_0


FIRST_OF_SEED_0 = ["17", "21", "01", "18", "23"]


def test_shuffle_mixes_samples_with_the_same_value() -> None:
    """Classes do not stay together, and their samples change places."""
    samples = [sample(f"{number:02d}", cls=b"%d" % (number // 30)) for number in range(60)]
    keys = shuffled(samples, "cls")
    assert sorted(keys) == [f"{number:02d}" for number in range(60)]
    assert len({key for key in keys[:30] if int(key) < 30}) not in (0, 30)


def test_shuffle_tells_the_same_key_apart_by_its_number() -> None:
    """The order of equal samples is not that in which they came."""
    samples = [sample("a", txt=b"%d" % number) for number in range(20)]
    found = [one["txt"] for one in sorted(samples, key=sort_key("__key__", "shuffle", seed=3))]
    assert sorted(found) == sorted(one["txt"] for one in samples)
    assert found != [one["txt"] for one in samples]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"field": "cls label"}, "'cls label'"), ({"field": ""}, "not ''"), ({"field": "cls;"}, "not 'cls;'")],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    """Before the first sample."""
    with pytest.raises(UsageError, match=message):
        sort_key(**arguments)
