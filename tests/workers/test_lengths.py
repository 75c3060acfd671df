"""What .set_length(n) promises: more than that is said once."""

from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.workers_kit import loader_of
from torchdata_wds import handlers


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "said", set())


def batches(samples: int) -> Any:
    return IterableWrapper(range(samples)).sharding_filter().batch(4)


@pytest.mark.parametrize(
    ("workers", "length", "warns"), [(2, 5, True), (2, 6, False), (2, 7, False), (0, 5, False), (0, 4, True)]
)
def test_set_length_warns_once_when_an_epoch_gives_more(
    workers: int, length: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty samples in batches of four are five batches of one process, and six of two."""
    with loader_of(batches(20).set_length(length).map(tuple), workers) as loader:
        for _ in range(2):
            assert len(list(loader)) == (6 if workers else 5)
    assert len(caplog.messages) == warns
    assert all(f"length is set to {length}" in message for message in caplog.messages)


def test_set_length_is_exact_when_it_follows_the_border(caplog: pytest.LogCaptureFixture) -> None:
    """Batches that are made in the main process are those of one process, and its length may be set there."""
    pipe = IterableWrapper(range(20)).sharding_filter().join_workers().batch(4).set_length(5)
    with loader_of(pipe) as loader:
        assert len(list(loader)) == len(pipe) == 5
    assert not caplog.messages


def test_set_length_warns_when_less_is_set_after_the_border(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(IterableWrapper(range(20)).sharding_filter().join_workers().batch(4).set_length(3)) as loader:
        assert len(list(loader)) == 5
    assert len(caplog.messages) == 1


def test_set_length_is_silent_when_the_epoch_is_left_early(caplog: pytest.LogCaptureFixture) -> None:
    with loader_of(batches(20).set_length(3), 0) as loader:
        next(iter(loader))
    assert not caplog.messages


def test_wds_epoch_has_its_length_by_itself_when_workers_run_it(caplog: pytest.LogCaptureFixture) -> None:
    """Also in front of a set_length that says the same."""
    pipe = batches(20).wds_epoch(5)
    with loader_of(pipe.set_length(5)) as loader:
        assert len(list(loader)) == len(pipe) == 5
    assert not caplog.messages
