"""What stages skip is counted over all processes, and told at the end of the epoch."""

import gc
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_samples, write_tar
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from tests.kits.workers_kit import FRONTS, loader_of, skipped_by
from torchdata_wds import StatefulPipeline, ignore_and_continue
from torchdata_wds.handlers import SkipCounts, count_loss

LOGGER = "torchdata_wds.workers.stats.skips"


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    """Three shards of five samples with a hidden file each, and one that is not there."""
    found = []
    for number in range(3):
        members = [*text_samples(f"s{number}", 5), (".hidden", b"x")]
        found.append(str(write_tar(tmp_path / f"{number}.tar", members)))
    return [*found, str(tmp_path / "gone.tar")]


def number_of(sample: Any) -> int:
    return int(sample["__key__"][-1])


def refuse_three(sample: Any) -> Any:
    if number_of(sample) == 3:
        raise ZeroDivisionError("three")
    return None if number_of(sample) == 2 else sample


def samples(urls: list[str]) -> IterDataPipe:
    pipe = IterableWrapper(urls).sharding_filter().load_wds_shards(handler=ignore_and_continue).group_by_key()
    return pipe.wds_map(refuse_three, handler=ignore_and_continue)


LOST = {"load_wds_shards()": {"ShardOpenError": 1}, "wds_map(refuse_three)": {"ZeroDivisionError": 3}}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 2])
def test_log_has_one_line_when_an_epoch_lost_items(
    workers: int, front: str, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """How many, which stages, which exceptions, and an example; again for each epoch."""
    with loader_of(samples(urls), workers, front=front) as loader:
        for _ in range(2):
            list(loader)
    one, two = (record.getMessage() for record in caplog.records if record.name == LOGGER)
    counts = "skipped 4 items: 3 by wds_map(refuse_three) (ZeroDivisionError), 1 by load_wds_shards() (ShardOpenError)"
    assert one.startswith(f"epoch 1 {counts}. One of them: wds_map(refuse_three) failed at sample 's0")
    assert one.endswith(": three")
    assert two.startswith(f"epoch 2 {counts}")


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("workers", [0, 1])
def test_log_is_silent_when_only_rules_left_items_out(
    workers: int, front: str, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A hidden file in each shard, or a function that returns None, is not worth a warning."""
    pipe = IterableWrapper(urls[:3]).sharding_filter().load_wds_shards().group_by_key()
    with loader_of(pipe, workers, front=front) as loader:
        assert len(list(loader)) == 15
        assert skipped_by(loader) == {}
        assert skipped_by(loader, by_rule=True) == {"group_by_key()": {"hidden file": 3}}
    assert not [record for record in caplog.records if record.name == LOGGER]


def test_report_is_shared_when_the_service_is_copied(urls: list[str]) -> None:
    """DataLoader2's copy tells the user's object; one that comes from another process begins with nothing."""
    service = WorkersReadingService(0)
    copied = pickle.dumps(service)
    loader = DataLoader2(samples(urls), reading_service=service)
    list(loader)
    loader.shutdown()
    assert service.skipped() == LOST
    del service, loader
    gc.collect()
    assert pickle.loads(copied).skipped() == {}


def test_stateful_pipeline_logs_when_an_epoch_lost_items(urls: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Each process says what it has lost."""
    list(StatefulPipeline(samples(urls)))
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert record.getMessage().startswith("epoch 1 skipped 4 items: 3 by wds_map(refuse_three)")


def test_counts_keep_their_losses_when_they_are_pickled() -> None:
    """They equal a plain Counter, and say which reasons are losses."""
    counts = SkipCounts()
    counts["hidden file"] += 2
    count_loss(counts, "KeyError", KeyError("a"))
    copy = pickle.loads(pickle.dumps(counts))
    assert copy == {"hidden file": 2, "KeyError": 1}
    assert (copy.losses, copy.examples) == ({"KeyError"}, {"KeyError": "'a'"})


def test_log_shows_few_kinds_when_there_are_many(caplog: pytest.LogCaptureFixture) -> None:
    """One line stays one line."""
    pipe: Any = IterableWrapper(range(8))
    for number in range(8):
        pipe = pipe.wds_map(RefuseOne(number), handler=ignore_and_continue)
    with caplog.at_level(logging.WARNING), loader_of(pipe, 0, front="loader") as loader:
        list(loader)
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert "epoch 1 skipped 8 items" in record.getMessage()
    assert "3 more kinds" in record.getMessage()


class RefuseOne:
    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, item: int) -> int:
        if item == self.number:
            raise ValueError(item)
        return item

    def __repr__(self) -> str:
        return f"RefuseOne({self.number})"


def refuse(item: str) -> str:
    if item == "T":
        raise ValueError(item)
    if item == "V":
        raise KeyError(item)
    return item


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_of_one_service_count_apart_when_one_runs_inside_the_other(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a model is validated in the middle of a training epoch."""
    service = WorkersReadingService(workers)

    def loader(items: list[str]) -> DataLoader2:
        pipe = IterableWrapper(items).wds_map(refuse, handler=ignore_and_continue)
        return DataLoader2(pipe, reading_service=service)

    with loader(["T", "T", *"12345"]) as train, loader(["V", "1"]) as validation:
        iterator = iter(train)
        assert [next(iterator), next(iterator)] == ["1", "2"]
        assert list(validation) == ["1"]
        assert service.skipped() == {"wds_map(refuse)": {"KeyError": 1}}
        assert list(iterator) == ["3", "4", "5"]
        assert service.skipped() == {"wds_map(refuse)": {"ValueError": 2}}
    told = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert ["KeyError" in text for text in told] == [True, False]
    assert "epoch 1 skipped 2 items" in told[1]
