"""What a pool promises about exceptions, and about items that cannot be sent."""

import sys
import threading
import time
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.pool_suite.kind import PoolKind
from torchdata_wds.errors import DecodingError, ShardFormatError


class PickyError(Exception):
    """Pickles, but cannot be rebuilt from its args."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")
        self.two = two


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class MainError(Exception):
    """As a script defines it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


def raise_in_main(item: str) -> str:
    if item == "main":
        raise MainError(7)
    return item


for defined in (MainError, MainError.__init__, raise_in_main):
    defined.__module__ = "__main__"
for defined in (MainError, raise_in_main):
    setattr(sys.modules["__main__"], defined.__name__, defined)


def one_of_each(kind: str) -> str:
    if kind == "format":
        raise ShardFormatError("cut off", shard="a.tar", member="b.jpg")
    if kind == "decode":
        raise DecodingError("bad jpeg", shard="a.tar", key="b", field="jpg") from ValueError("the cause")
    if kind == "key":
        return {}[kind]
    if kind == "picky":
        raise PickyError(1, 2)
    if kind == "locked":
        raise LockedError("has a lock")
    return kind


class Unloadable:
    """Pickles, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def odd_item(item: Any) -> Any:
    """The items that some tests need, made where a stage runs."""
    match item:
        case "lock":
            return threading.Lock()
        case "lambda":
            return lambda: item
        case "unloadable":
            return Unloadable()
        case "error":
            raise KeyError(item)
        case "stuck":
            time.sleep(1000)
    return item


class FailureSuite:
    """Exceptions in workers, and items that cannot be sent."""

    @pytest.mark.parametrize(
        ("kind", "error", "attributes"),
        [
            ("format", ShardFormatError, {"shard": "a.tar", "member": "b.jpg", "key": None}),
            ("picky", PickyError, {"two": 2}),
            ("decode", DecodingError, {"shard": "a.tar", "key": "b", "field": "jpg"}),
            ("key", KeyError, {}),
        ],
    )
    def test_exception_keeps_type_and_attributes(
        self, pool: PoolKind, kind: str, error: type[Exception], attributes: dict[str, Any]
    ) -> None:
        """It has the worker's traceback as its cause; the next epoch is a new one, unless DataLoader2 has shut down."""
        loader = pool.loader(IterableWrapper(["fine", kind]).sharding_filter().map(one_of_each))
        items = iter(loader)
        assert next(items) == "fine"
        with pytest.raises(error) as caught:
            next(items)
        assert type(caught.value) is error
        assert {name: getattr(caught.value, name) for name in attributes} == attributes
        text = pool.came_from(caught.value)
        assert "in one_of_each" in text
        assert ("ValueError: the cause" in text) == (kind == "decode")
        if pool.workers:
            assert "In worker 1" in text
        if pool.front == "loader":
            with pytest.raises(RuntimeError, match=f"ended by {error.__name__}"):
                next(items)
            assert next(iter(loader)) == "fine"
        loader.shutdown()
        assert not pool.left()
        with pytest.raises(RuntimeError, match="shut down"):
            iter(loader)

    def test_exception_of_the_main_module_keeps_its_type(self, pool: PoolKind) -> None:
        """And its attributes."""
        pipe = IterableWrapper(["fine", "main"]).sharding_filter().map(raise_in_main)
        with pool.loader(pipe) as loader, pytest.raises(MainError) as caught:
            list(loader)
        assert (str(caught.value).splitlines()[0], caught.value.code) == ("code 7", 7)
        assert "in raise_in_main" in pool.came_from(caught.value)

    def test_division_that_fails_is_an_error(self, pool: PoolKind) -> None:
        """An exception in setting a stream up is raised like any other."""
        pipe = IterableWrapper(range(4)).sharding_filter().sharding_filter()
        with pool.loader(pipe) as loader, pytest.raises(RuntimeError, match="Sharding twice"):
            list(loader)


class SendingSuite:
    """What cannot be sent from a worker, or in time."""

    def test_exception_is_quoted_when_it_cannot_be_sent(self, pool: PoolKind) -> None:
        """A RuntimeError has its name, text and traceback."""
        pipe = IterableWrapper(["locked"]).sharding_filter().map(one_of_each)
        with (
            pool.of(1).loader(pipe) as loader,
            pytest.raises(RuntimeError, match=r"LockedError in worker 0 .*has a lock") as caught,
        ):
            list(loader)
        assert "in one_of_each" in pool.came_from(caught.value)

    @pytest.mark.parametrize(("last", "error"), [("error", KeyError), ("lock", RuntimeError)])
    def test_items_come_before_the_error_that_follows_them(
        self, pool: PoolKind, last: str, error: type[Exception]
    ) -> None:
        """An error has its place among the items, also when they are sent together."""
        found = []
        with pytest.raises(error), pool.of(1).loader(IterableWrapper([*range(7), last, 8]).map(odd_item)) as loader:
            for item in loader:
                found.append(item)
        assert found == list(range(7))

    @pytest.mark.parametrize(("item", "name"), [("lock", "lock"), ("lambda", "function")])
    def test_item_that_cannot_be_pickled_is_an_error(self, pool: PoolKind, item: str, name: str) -> None:
        """It names the worker, the type and the cure."""
        pipe = IterableWrapper([0, item, 2, 3]).sharding_filter().map(odd_item)
        with (
            pool.loader(pipe) as loader,
            pytest.raises(RuntimeError, match=rf"worker 1 .* could not send an item of type {name}") as caught,
        ):
            list(loader)
        assert "move the stage that makes it after .join_workers()" in str(caught.value)

    def test_item_that_cannot_be_unpickled_is_an_error(self, pool: PoolKind) -> None:
        """The one that rebuilding it raises."""
        pipe = IterableWrapper([0, "unloadable", 2]).sharding_filter().map(odd_item)
        with pool.loader(pipe) as loader, pytest.raises(ValueError, match="invalid literal"):
            list(loader)

    @pytest.mark.slow
    def test_item_that_takes_longer_than_the_timeout_is_an_error(self, pool: PoolKind) -> None:
        """And shutdown does not wait for it."""
        pipe = IterableWrapper([0, 1, "stuck", 3]).sharding_filter().map(odd_item)
        with pool.loader(pipe, timeout=pool.patience) as loader, pytest.raises(RuntimeError, match="timeout="):
            list(loader)
        assert not pool.left()

    @pytest.mark.slow
    def test_items_and_shutdown_do_not_wait_for_a_stage_that_is_stuck(self, pool: PoolKind) -> None:
        """What a worker has made does not wait for its next item."""
        loader = pool.of(1).loader(IterableWrapper([0, 1, 2, "stuck"]).map(odd_item))
        items = iter(loader)
        assert [next(items), next(items), next(items)] == [0, 1, 2]
        loader.shutdown()
        assert not pool.left()
