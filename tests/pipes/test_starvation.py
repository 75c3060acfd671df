"""Endless sources of which nothing comes are an error, however the graph is built; where little comes they are not."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import left_of, loader_of, resumed, run, stopped
from tests.kits.shards import write_text_shards
from tests.kits.workers_kit import time_limit
from torchdata_wds import ShardListError, ignore_and_continue
from torchdata_wds.pipes import starvation

#: Sizes of three shards without a sample, and of two with some.
EMPTY, FULL = (0, 0, 0), (3, 2)


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(starvation, "_DROPPED_ITEMS", 60)
    monkeypatch.setattr(starvation, "_HELD_ITEMS", 900)
    with time_limit(60):
        yield


def never(item: Any) -> bool:
    return False


def nothing(item: Any) -> None:
    return None


def fail(item: Any) -> Any:
    raise ValueError("always")


def no_items(item: Any) -> list[Any]:
    return []


def swallow(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        if never(item):
            yield item


class Swallows(IterDataPipe):
    """A stage of the user's that drops everything."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return swallow(self.inner)


def drawn(urls: list[str], **options: Any) -> Any:
    return IterableWrapper(urls).resample_shards().load_wds_shards(**options).group_by_key()


def listed(urls: list[str]) -> Any:
    return IterableWrapper(urls).list_shards().shuffle().sharding_filter()


Build = Callable[[list[str]], Any]

#: Graphs that give nothing for shards without samples.
OF_EMPTY: dict[str, Build] = {
    "plain": drawn,
    "one shard": lambda urls: drawn(urls[:1]),
    "without replacement": lambda urls: (
        IterableWrapper(urls).resample_shards(replacement=False).load_wds_shards().group_by_key()
    ),
    "decode, batch": lambda urls: drawn(urls).wds_decode().batch(4),
    "shuffle, batch, epoch": lambda urls: drawn(urls).wds_shuffle(9).batch(4).wds_epoch(3),
    "read ahead": lambda urls: drawn(urls, read_ahead=3).batch(2),
    "interleave": lambda urls: drawn(urls, interleave=2).batch(2),
    "stages between": lambda urls: IterableWrapper(urls).resample_shards().load_wds_shards().map(str).batch(2),
    "native readers": lambda urls: (
        IterableWrapper(urls).resample_shards().open_files(mode="rb").load_from_tar().group_by_key()
    ),
    "a mix": lambda urls: drawn(urls).wds_mix(IterableWrapper(range(9)), stop="all").wds_epoch(30),
    "cycle": lambda urls: listed(urls).load_wds_shards().group_by_key().batch(2).cycle(),
    "cycle of shards": lambda urls: listed(urls).cycle().load_wds_shards().group_by_key().batch(2),
    "cycle of few draws": lambda urls: (
        IterableWrapper(urls).resample_shards(4).load_wds_shards().group_by_key().cycle()
    ),
}

#: Graphs that give nothing of shards with samples.
OF_FULL: dict[str, Build] = {
    "select": lambda urls: drawn(urls, select="*.jpg"),
    "fields": lambda urls: IterableWrapper(urls).resample_shards().load_wds_shards().group_by_key(fields="jpg"),
    "filter": lambda urls: drawn(urls).filter(never),
    "filter, epoch": lambda urls: drawn(urls).filter(never).batch(2).wds_epoch(4),
    "filter behind a shuffle": lambda urls: drawn(urls).wds_shuffle(20).filter(never).batch(2),
    "map to None": lambda urls: drawn(urls).wds_map(nothing).batch(2),
    "handler": lambda urls: drawn(urls).wds_map(fail, handler=ignore_and_continue),
    "missing fields": lambda urls: drawn(urls).wds_to_tuple("jpg", missing="skip").wds_epoch(4),
    "flatmap": lambda urls: drawn(urls).flatmap(no_items),
    "a generator function": lambda urls: drawn(urls).wds_compose(swallow).batch(2).wds_epoch(4),
    "a stage of the user's": lambda urls: Swallows(drawn(urls)).batch(2),
    "filter of members": lambda urls: (
        IterableWrapper(urls).resample_shards().load_wds_shards().filter(never).group_by_key()
    ),
    "cycle": lambda urls: listed(urls).load_wds_shards().group_by_key().filter(never).cycle(),
    "cycle of shards": lambda urls: listed(urls).cycle().load_wds_shards().group_by_key().filter(never).wds_epoch(2),
}


@pytest.mark.parametrize("build", OF_EMPTY.values(), ids=OF_EMPTY)
def test_graph_raises_when_endless_shards_are_empty(build: Build, tmp_path: Path) -> None:
    """With batches, shuffles and other sources or without, the message says what was read."""
    graph = build(write_text_shards(tmp_path, EMPTY))
    with pytest.raises(ShardListError, match=r"nothing came of .*Check that the shards have samples"):
        list(islice(graph, 100))


@pytest.mark.parametrize("build", OF_FULL.values(), ids=OF_FULL)
def test_graph_raises_when_all_of_endless_shards_is_dropped(build: Build, tmp_path: Path) -> None:
    """By the loader, the grouping, or a stage far behind them."""
    graph = build(write_text_shards(tmp_path, FULL))
    with pytest.raises(ShardListError, match=r"nothing came of .*Check that the shards have samples"):
        list(islice(graph, 100))


def test_graph_says_what_was_skipped_when_no_shard_can_be_read(tmp_path: Path) -> None:
    """The draws, the stage, and the exceptions by their number."""
    (tmp_path / "broken.tar").write_bytes(b"not an archive" * 100)
    urls = [f"{tmp_path}/broken.tar", f"{tmp_path}/gone.tar"]
    with pytest.raises(ShardListError) as caught:
        list(drawn(urls, handler=ignore_and_continue).wds_epoch(3))
    message = str(caught.value)
    assert message.startswith("resample_shards has drawn each of 2 shards, 20 draws in all, and nothing came of them: ")
    for part in ("KeyGrouper has yielded nothing for the 20 items it took", " x ShardFormatError", " x ShardOpenError"):
        assert part in message


@pytest.mark.parametrize(
    "hold", [lambda pipe: pipe.batch(200), lambda pipe: pipe.prefetch(2).wds_shuffle(200, initial=200)]
)
@pytest.mark.parametrize("build", [drawn, lambda urls, **k: listed(urls).cycle().load_wds_shards(**k).group_by_key()])
def test_graph_raises_when_shards_vanish_while_a_stage_holds_items(build: Any, hold: Any, tmp_path: Path) -> None:
    """Something came of them, but no longer does."""
    urls = write_text_shards(tmp_path, FULL)

    left = iter(range(80))

    def remove(sample: Any) -> Any:
        for url in urls if next(left, None) is None else ():
            Path(url).unlink(missing_ok=True)
        return sample

    pipe = hold(build(urls, handler=ignore_and_continue).wds_map(remove))
    with pytest.raises(ShardListError, match=r"nothing came of .* x ShardOpenError"):
        list(islice(pipe, 1))


#: Graphs that wait long for an item, which comes.
PATIENT: dict[str, Build] = {
    "one shard of many": lambda urls: drawn([*[urls[0]] * 40, urls[3]]).batch(10),
    "large batches": lambda urls: drawn(urls).batch(150),
    "a large shuffle": lambda urls: drawn(urls, read_ahead=3).wds_shuffle(200, initial=200).batch(70),
    "a native shuffle": lambda urls: drawn(urls, interleave=3).shuffle(buffer_size=200).batch(70).wds_epoch(7),
    "shuffled shards": lambda urls: (
        IterableWrapper(urls).resample_shards().shuffle(buffer_size=200).load_wds_shards().group_by_key()
    ),
    "passed on": lambda urls: drawn(urls).wds_compose(late),
    "cycle": lambda urls: listed(urls).load_wds_shards().group_by_key().cycle().batch(100),
    "cycle of shards": lambda urls: listed(urls).cycle().load_wds_shards().group_by_key().batch(100),
}


def late(items: Iterator[Any]) -> Iterator[Any]:
    """Drops so many items before the first that any stage that is known to drop them would be blamed."""
    yield from islice(items, 300, None)


@pytest.mark.parametrize("build", PATIENT.values(), ids=PATIENT)
def test_graph_goes_on_when_something_comes_of_its_shards(build: Build, tmp_path: Path) -> None:
    """However long it takes: stages that may hold items are not blamed, and stages of users late."""
    assert len(list(islice(build(write_text_shards(tmp_path, (*EMPTY, *FULL))), 5))) == 5


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["resample", "cycle", "cycle of all workers"])
def test_service_raises_when_nothing_comes(form: str, workers: int, tmp_path: Path) -> None:
    """In workers as in the main process."""
    urls = write_text_shards(tmp_path, EMPTY)
    graphs = {"resample": drawn, "cycle": OF_EMPTY["cycle"]}
    pipe = graphs[form](urls) if form in graphs else listed(urls).load_wds_shards().join_workers().cycle()
    with loader_of(pipe, workers) as loader, pytest.raises(ShardListError, match="nothing"):
        list(islice(loader, 100))


def in_epochs(urls: list[str]) -> Any:
    return drawn(urls).wds_shuffle(30).wds_decode().wds_to_tuple("__key__").wds_epoch(200)


def test_resume_goes_on_when_many_draws_come_before_it(tmp_path: Path) -> None:
    """Shards that a resumed stream only passes over have not been read for nothing."""
    urls = write_text_shards(tmp_path, FULL)
    whole = run(in_epochs(urls), 0, 2)
    assert resumed(stopped(in_epochs(urls), 0, 0, 160), 0, 2) == left_of(whole, 0, 160)


def test_epochs_may_be_empty_when_nothing_cycles(tmp_path: Path) -> None:
    """A worker that has no shard has an empty epoch each time, which is no endless loop."""
    pipe = listed(write_text_shards(tmp_path, EMPTY)).load_wds_shards().group_by_key()
    assert [list(pipe) for _ in range(30)] == [[]] * 30
