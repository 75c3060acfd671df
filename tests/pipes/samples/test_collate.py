"""Batches and back."""

from collections import namedtuple
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import webdataset.filters
from PIL import Image
from torch.utils.data import DataChunk, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import wds_collate

Point = namedtuple("Point", "x y")


class Colour(IntEnum):
    RED = 1


IMAGE = Image.new("RGB", (2, 2))


def same(one: Any, two: Any) -> bool:
    """Equal in type, dtype, shape and values."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[field], two[field]) for field in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one is two or bool(one == two)


STACKED = [
    ([1, 2], torch.tensor([1, 2])),
    ([-(2**63), 2**63 - 1], torch.tensor([-(2**63), 2**63 - 1])),
    ([1.5, 2.0], torch.tensor([1.5, 2.0], dtype=torch.float64)),
    ([1, 2.5], torch.tensor([1.0, 2.5], dtype=torch.float64)),
    ([2.5, 1], torch.tensor([2.5, 1.0], dtype=torch.float64)),
    ([True, False], torch.tensor([True, False])),
    ([torch.zeros(2), torch.ones(2)], torch.tensor([[0.0, 0.0], [1.0, 1.0]])),
    ([torch.tensor(1), torch.tensor(2)], torch.tensor([1, 2])),
    ([torch.tensor(True)], torch.tensor([True])),
    ([torch.zeros(0), torch.zeros(0)], torch.zeros(2, 0)),
    ([np.zeros(2, "f4"), np.ones(2, "f4")], np.array([[0, 0], [1, 1]], "f4")),
    ([np.array(1, "i2"), np.array(2, "i2")], np.array([1, 2], "i2")),
    ([np.int16(1), np.int16(2)], np.array([1, 2], "i2")),
    ([np.float64(1), np.float64(2)], np.array([1.0, 2.0])),
    ([np.bool_(True), np.bool_(False)], np.array([True, False])),
    ([np.datetime64("2020-01-01"), np.datetime64("2021-01-01")], np.array(["2020-01-01", "2021-01-01"], "M8[D]")),
]

KEPT: list[list[Any]] = [
    ["a", "b"],
    [b"a", b"b"],
    [np.str_("a"), np.str_("b")],
    [np.bytes_(b"a"), np.bytes_(b"b")],
    [{"a": 1}, {"b": 2}],
    [[1, 2], [3]],
    [(1, 2), (3, 4)],
    [IMAGE, IMAGE],
    [None, None],
    [1, None],
    [None, 1],
    [1, "a"],
    [True, 2],
    [1 + 2j, 3j],
    [Fraction(1, 2), Fraction(1, 3)],
    [Colour.RED, Colour.RED],
    [2**63, 1],
    [2**70, 1.0],
    [0.5, 10**400],
    [2**53 + 1, 0.5],
    [torch.zeros(2), torch.zeros(3)],
    [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
    [torch.zeros(1), 1.0],
    [torch.zeros(2), np.zeros(2)],
    [np.zeros(2), np.zeros((2, 1))],
    [np.zeros(2, "f4"), np.zeros(2, "f8")],
    [np.int64(1), 2],
    [1.0, np.float64(2)],
]


@pytest.mark.parametrize(("values", "expected"), STACKED)
def test_wds_collate_stacks_a_column_when_values_are_alike(values: list[Any], expected: Any) -> None:
    """Tensors, arrays and numbers become one tensor or array, wherever the column stands."""
    assert same(wds_collate(values), expected)
    assert same(wds_collate([(value, "x") for value in values]), (expected, ["x"] * len(values)))
    assert same(wds_collate([{"a": "x", "b": value} for value in values]), {"a": ["x"] * len(values), "b": expected})


@pytest.mark.parametrize("values", KEPT)
def test_wds_collate_keeps_a_list_when_values_do_not_stack(values: list[Any]) -> None:
    """Everything else stays as it was, in order; numbers never lose digits."""
    (column,) = wds_collate([(value,) for value in values])
    assert type(column) is list
    assert all(one is two for one, two in zip(column, values, strict=True))


def test_wds_collate_equals_webdataset_when_columns_are_arrays_tensors_and_strings() -> None:
    """The shape of a batch is webdataset's; numbers are a tensor here, an array there."""
    rows = [(torch.full((2,), number), np.full(3, number), number, str(number)) for number in range(3)]
    ours, theirs = wds_collate(rows), webdataset.filters.default_collation_fn(rows)
    assert same(ours[0], theirs[0])
    assert same(ours[1], theirs[1])
    assert same(ours[2].numpy(), theirs[2])
    assert ours[3] == theirs[3]


def test_wds_collate_gives_a_tuple_when_rows_are_lists_or_named_tuples() -> None:
    """A batch of rows is a tuple of columns, whatever kind of sequence the rows are."""
    assert same(wds_collate([[1, "a"], [2, "b"]]), (torch.tensor([1, 2]), ["a", "b"]))
    assert same(wds_collate([Point(1, 2)]), (torch.tensor([1]), torch.tensor([2])))


def test_wds_collate_keeps_the_order_of_fields_when_samples_differ_in_it() -> None:
    """Samples with the same fields belong together in any order; the first one's counts."""
    assert list(wds_collate([{"a": 1, "b": 2}, {"b": 3, "a": 4}]).items()) == [
        ("a", pytest.approx(torch.tensor([1, 4]))),
        ("b", pytest.approx(torch.tensor([2, 3]))),
    ]


def test_wds_collate_names_two_sets_of_fields_when_samples_differ() -> None:
    """The error shows sets that do differ, also where the order differs as well, and says what to do."""
    with pytest.raises(ValueError, match="different fields") as caught:
        wds_collate([{"a": 1, "b": 2}, {"b": 1, "a": 2}, {"a": 1, "c": 2}])
    assert "['a', 'b'] and ['a', 'c']" in str(caught.value)
    assert ".wds_to_tuple" in str(caught.value)
    with pytest.raises(ValueError, match=r"\['a'\] and int"):
        wds_collate([{"a": 1}, 3])


def test_wds_collate_names_two_lengths_when_tuples_differ() -> None:
    """The error shows the lengths, or what else came; rows without columns would lose their number."""
    with pytest.raises(ValueError, match="lengths: 1 and 2"):
        wds_collate([(1, 2), (1,)])
    with pytest.raises(ValueError, match=r"2 and \['a'\]"):
        wds_collate([(1, 2), {"a": 1}])
    for rows in ([(), ()], [{}, {}]):
        with pytest.raises(ValueError, match="no fields"):
            wds_collate(rows)
    assert wds_collate([]) == []


def test_wds_collate_takes_any_iterable_when_called() -> None:
    """Lists, the native batch's DataChunk, and generators."""
    expected = (torch.tensor([1, 2]), ["a", "b"])
    rows = [(1, "a"), (2, "b")]
    assert same(wds_collate(DataChunk(rows)), expected)
    assert same(wds_collate(tuple(rows)), expected)
    assert same(wds_collate(row for row in rows), expected)


def test_wds_collate_keeps_gradients_when_tensors_require_them() -> None:
    """Stacking is differentiable, as in torch's default_collate."""
    leaf = torch.ones(2, requires_grad=True)
    (batch,) = wds_collate([(leaf,), (leaf * 2,)])
    batch.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2,), 3.0))


def test_wds_collate_copies_values_when_it_stacks() -> None:
    """A batch does not change when the samples do."""
    array, tensor = np.zeros(2), torch.zeros(2)
    batch = wds_collate([(array, tensor), (array, tensor)])
    array += 1
    tensor += 1
    assert batch[0].sum() == batch[1].sum() == 0


BATCHES: list[Any] = [
    (torch.tensor([1, 2]), ["a", "b"]),
    {"__key__": ["a", "b"], "cls": torch.tensor([1, 2]), "img": torch.zeros(2, 3, 4)},
    (np.zeros((2, 3), "f4"), [{"a": 1}, {"b": 2}], torch.tensor([1.5, 2.5], dtype=torch.float64)),
    (torch.tensor([True, False]), np.array([1, 2], "u1"), [IMAGE, IMAGE], [torch.zeros(1), torch.zeros(2)]),
    (torch.zeros(0, 3), []),
]


@pytest.mark.parametrize("batch", BATCHES)
def test_wds_unbatch_is_undone_by_collating_when_batches_are_wds_collates(batch: Any) -> None:
    """Apart and together again is the same batch, in types, dtypes and order."""
    rows = list(IterableWrapper([batch]).wds_unbatch())
    size = len(next(iter(batch.values()))) if isinstance(batch, dict) else len(batch[0])
    assert len(rows) == size
    assert not rows or same(wds_collate(rows), batch)


@pytest.mark.parametrize("batch", [batch for batch in BATCHES if not isinstance(batch, list)])
def test_wds_unbatch_equals_webdataset_when_batches_are_tuples_or_dicts(batch: Any) -> None:
    """Rows are tuples or dicts of the columns' values."""
    assert same(list(IterableWrapper([batch]).wds_unbatch()), list(webdataset.filters.unbatched()(iter([batch]))))


def test_wds_unbatch_takes_lists_of_columns_when_a_loader_has_made_them() -> None:
    """Torch's pin_memory and default_collate turn tuples into lists."""
    assert list(IterableWrapper([[[1, 2], ["a", "b"]]]).wds_unbatch()) == [(1, "a"), (2, "b")]


def test_wds_unbatch_raises_when_columns_differ_in_length_or_were_not_collated() -> None:
    """No row may be cut off, and a list of samples would be mixed up."""
    with pytest.raises(ValueError, match=r"different lengths: \[1, 2\]"):
        list(IterableWrapper([([1, 2], [1])]).wds_unbatch())
    with pytest.raises(ValueError, match="not collated"):
        list(IterableWrapper([("a", 1), ("b", 2)]).batch(2).wds_unbatch())


@pytest.mark.parametrize("sizes", [(1, 1), (3, 5), (7, 2), (16, 20), (50, 50)])
def test_batches_of_another_size_hold_the_same_samples_when_rebatched(sizes: tuple[int, int]) -> None:
    """Batch, collate, take apart, batch again: nothing lost, order kept."""
    rows = [(torch.full((2,), number), number, str(number), {"n": number}) for number in range(23)]
    pipe: IterDataPipe[Any] = IterableWrapper(rows).batch(sizes[0]).collate(wds_collate).wds_unbatch()
    batches = list(pipe.batch(sizes[1]).collate(wds_collate))
    assert [number for batch in batches for number in batch[1].tolist()] == list(range(23))
    assert [text for batch in batches for text in batch[2]] == [str(number) for number in range(23)]
    assert {len(batch[0]) for batch in batches[:-1]} <= {sizes[1]}


def test_wds_collate_keeps_masked_arrays_when_stacking_would_lose_their_mask() -> None:
    """Masked arrays stay a list."""
    arrays = [np.ma.array([1, 2], mask=[False, True]) for _ in range(2)]
    column = wds_collate(arrays)
    assert isinstance(column, list)
    assert [array.mask.tolist() for array in column] == [[False, True]] * 2


@pytest.mark.parametrize(
    ("samples", "word"),
    [
        ([(b"\xff\xd8\xff\xe0", 1)], "not decoded"),
        ([(b"7", 1)], "not decoded"),
        ([{"json": b"{}"}], "'json'"),
        ([(IMAGE, 1)], "PIL images"),
    ],
)
def test_collate_warns_once_when_a_column_was_probably_meant_to_be_a_tensor(
    samples: list[Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A forgotten decode or conversion is told at the batch, not by the model."""
    wds_collate(samples)
    wds_collate(samples)
    assert [word in record.message for record in caplog.records] == [True]


def test_collate_is_silent_when_columns_are_what_they_seem(caplog: pytest.LogCaptureFixture) -> None:
    """Texts, dicts, raw bytes and decoded values stay lists without a word."""
    wds_collate([{"txt": "a", "json": {}, "bin": b"\0", "cls": 7}])
    wds_collate([("a", b"", b"\0raw", np.zeros(3))])
    assert not caplog.records


class Tagged(torch.Tensor):
    """A subclass that stacks in its own way, which takes no out=."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.stack:
            return (lambda tensors, dim=0: "stacked")(*args, **(kwargs or {}))
        return super().__torch_function__(function, types, args, kwargs)


class TaggedArray(np.ndarray):
    """The same for NumPy."""

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return (lambda arrays, axis=0: "stacked")(*args, **kwargs)


def test_wds_collate_leaves_stacking_to_a_subclass_that_has_its_own() -> None:
    """Of tensors and of arrays."""
    assert wds_collate([torch.ones(2).as_subclass(Tagged)] * 2) == "stacked"
    assert wds_collate([np.ones(2).view(TaggedArray)] * 2) == "stacked"
