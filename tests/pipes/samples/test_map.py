"""Mapping items through a function, and the loop that most pipes share."""

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import webdataset.filters
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.forms import functional_forms
from torchdata_wds import ignore_and_continue, ignore_and_stop, warn_and_continue, warn_and_stop
from torchdata_wds.pipes.form_names import TORCHDATA_FORMS


def even_only(sample: dict[str, Any]) -> dict[str, Any] | None:
    return {"value": sample["value"] * 10} if sample["value"] % 2 == 0 else None


SAMPLES = [{"__key__": str(number), "value": number} for number in range(5)]


def test_wds_map_equals_webdataset_when_the_function_makes_new_samples_and_none() -> None:
    """None drops the item; a new dict gets the key of the old."""
    pipe = IterableWrapper(SAMPLES).wds_map(even_only)
    assert list(pipe) == list(webdataset.filters.map(even_only)(iter(SAMPLES)))
    assert pipe.skipped == {"None": 2}


def test_wds_map_keeps_a_key_when_the_function_sets_one() -> None:
    """A function may rename samples; unlike webdataset's, the key that it gives stays."""
    (sample,) = IterableWrapper(SAMPLES[:1]).wds_map(lambda sample: {"__key__": "new"})
    assert sample == {"__key__": "new"}


def test_wds_map_gives_each_sample_its_key_when_the_function_gives_one_dict_for_all() -> None:
    """The function's dict, a table's row say, is not changed."""
    table = {"value": "row"}
    assert [sample["__key__"] for sample in IterableWrapper(SAMPLES).wds_map(lambda _: table)] == list("01234")
    assert table == {"value": "row"}


@pytest.mark.parametrize("result", [0, "", b"", (), [], {}, False])
def test_wds_map_keeps_results_that_are_false_when_they_are_not_none(result: Any) -> None:
    """Only None drops an item."""
    assert list(IterableWrapper([1, 2]).wds_map(lambda _: result)) == [result, result]


def test_wds_map_has_no_length() -> None:
    """It may drop items; torchdata's set_length says what the user knows."""
    with pytest.raises(TypeError, match="set_length"):
        len(IterableWrapper([1]).wds_map(int))
    assert len(IterableWrapper(["1"]).wds_map(int).set_length(1)) == 1


@pytest.mark.parametrize(
    ("handler", "given", "word"),
    [
        (warn_and_continue, [1, 2], "skipped"),
        (ignore_and_continue, [1, 2], None),
        (warn_and_stop, [1], "stopped"),
        (ignore_and_stop, [1], None),
        (lambda error: isinstance(error, ValueError), [1, 2], None),
        (lambda error: isinstance(error, TypeError), [1], None),
    ],
)
def test_wds_map_asks_the_handler_when_its_function_raises(
    handler: Any, given: list[int], word: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The five handlers and any function of an exception: skip or stop, with a warning or without, always counted."""
    pipe = IterableWrapper(["1", "x", "2"]).wds_map(int, handler=handler)
    with caplog.at_level(logging.INFO):
        assert list(pipe) == given
    assert pipe.skipped == {"ValueError": 1}
    assert [record.levelname for record in caplog.records] == (["WARNING"] if word else [])
    assert word is None or word in caplog.text


def test_wds_map_goes_on_counting_when_iterated_again() -> None:
    """`.skipped` sums over epochs."""
    pipe = IterableWrapper(["x", "2"]).wds_map(int, handler=ignore_and_continue)
    assert [list(pipe), list(pipe)] == [[2], [2]]
    assert pipe.skipped == {"ValueError": 2}


def test_wds_map_raises_when_its_source_does() -> None:
    """A handler is asked about this pipe's own items only: a source that fails has its own handler."""
    pipe = IterableWrapper(["x"]).wds_map(int).wds_map(str, handler=ignore_and_continue)
    with pytest.raises(ValueError, match="invalid literal"):
        list(pipe)
    assert not pipe.skipped


def test_wds_map_skips_one_item_when_its_function_raises_stop_iteration() -> None:
    """StopIteration of a function is an error like any other, not the end of the stream."""

    def first_of(values: list[int]) -> int:
        return next(iter(values))

    assert list(IterableWrapper([[1], [], [2]]).wds_map(first_of, handler=ignore_and_continue)) == [1, 2]
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(IterableWrapper([[]]).wds_map(first_of))


def test_wds_map_lets_interrupts_through() -> None:
    """Only exceptions that are errors go to the handler."""

    def interrupt(_: int) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(IterableWrapper([1]).wds_map(interrupt, handler=ignore_and_continue))


def test_wds_map_is_lazy() -> None:
    """An item is asked for when it is needed, not before."""
    asked: list[int] = []
    pipe = IterableWrapper(range(3)).wds_map(lambda number: asked.append(number) or number).wds_map(str)
    assert next(iter(pipe)) == "0"
    assert asked == [0]


SOURCE = IterableWrapper([])
PIPES: dict[str, IterDataPipe[Any]] = {
    "list_shards": SOURCE.list_shards(),
    "resample_shards": SOURCE.resample_shards(),
    "split_shards": SOURCE.split_shards(),
    "cache_shards": SOURCE.cache_shards("cache"),
    "load_wds_shards": SOURCE.load_wds_shards(),
    "group_by_key": SOURCE.group_by_key(),
    "wds_epoch": SOURCE.wds_epoch(1),
    "wds_shuffle": SOURCE.wds_shuffle(),
    "wds_decode": SOURCE.wds_decode(),
    "wds_interleaved": SOURCE.wds_interleaved(),
    "wds_rename": SOURCE.wds_rename(a="b"),
    "wds_map_dict": SOURCE.wds_map_dict(a=int),
    "wds_rename_keys": SOURCE.wds_rename_keys(a="b"),
    "wds_to_tuple": SOURCE.wds_to_tuple("a"),
    "wds_extract_keys": SOURCE.wds_extract_keys("a"),
    "wds_map_tuple": SOURCE.wds_map_tuple(int),
    "wds_map": SOURCE.wds_map(int),
    "wds_compose": SOURCE.wds_compose(list),
    "wds_encode": SOURCE.wds_encode(),
    "save_wds_shards": SOURCE.save_wds_shards("x-%d.tar"),
    "wds_unbatch": SOURCE.wds_unbatch(),
    "load_in_order": SOURCE.load_in_order(),
    "wds_mix": SOURCE.wds_mix(stop="all"),
    "cache_samples": SOURCE.cache_samples(None),
    "load_cbor_shards": SOURCE.load_cbor_shards(),
    "load_msgpack_shards": SOURCE.load_msgpack_shards(),
    "join_workers": SOURCE.join_workers(),
}


def test_attributes_shadow_no_functional_form() -> None:
    """An attribute called like a functional form would hide it on that pipe: `self.batch = 3` ends `.batch()`."""
    assert set(PIPES) == set(functional_forms)
    for name, pipe in PIPES.items():
        hidden = (set(vars(pipe)) | set(dir(type(pipe)))) & (set(IterDataPipe.functions) | TORCHDATA_FORMS)
        assert not hidden, f"{name} hides {hidden}"


@pytest.mark.parametrize("name", [name for name, pipe in PIPES.items() if hasattr(pipe, "apply")])
def test_item_pipes_raise_when_the_handler_is_no_function(name: str) -> None:
    """A handler given by name, or None, is refused by the constructor."""
    arguments: dict[str, Any] = {"wds_rename": {"a": "b"}, "wds_map_dict": {"a": int}, "wds_rename_keys": {"a": "b"}}
    positional = {"wds_to_tuple": ("a",), "wds_extract_keys": ("a",), "wds_map": (int,)}
    for handler in ("warn_and_continue", None, True):
        with pytest.raises(TypeError, match="handler must be a function"):
            getattr(SOURCE, name)(*positional.get(name, ()), handler=handler, **arguments.get(name, {}))


def doubled(item: Any) -> Iterator[Any]:
    yield item
    yield item


class Doubler:
    def __call__(self, item: Any) -> Iterator[Any]:
        yield item


async def later(item: Any) -> Any:
    return item


@pytest.mark.parametrize("fn", [doubled, Doubler(), functools.partial(doubled), later])
@pytest.mark.parametrize(
    "form",
    [
        lambda pipe, fn: pipe.wds_map(fn),
        lambda pipe, fn: pipe.wds_map_tuple(None, fn),
        lambda pipe, fn: pipe.wds_map_dict(cls=fn),
        lambda pipe, fn: pipe.wds_decode("pil", fn),
        lambda _, fn: torchdata_wds.load_dataset({"dataset": [{"shards": "x.tar"}]}, transforms=fn),
    ],
)
def test_maps_refuse_when_a_function_is_a_generator_function(form: Any, fn: Any) -> None:
    """Its result would be a generator in the place of each item; the message names what takes such functions."""
    with pytest.raises(TypeError, match=r"\.wds_compose\(f\).*\.flatmap\(f\)|coroutine function"):
        form(IterableWrapper([]), fn)
