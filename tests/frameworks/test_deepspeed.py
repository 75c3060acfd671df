"""The manual's endless iterator for DeepSpeed, beside one that repeats a loader as DeepSpeed's own does."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.framework_kit import check_epochs, example, make_shards


class Repeating:
    """Begins the loader at once, and again whenever it ends, as deepspeed.utils.RepeatingLoader does."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_endless_iterators_resume_with_the_next_batch(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places of a data-parallel group that know nothing of one another: each sample comes once per epoch."""
    make_shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(example("DeepSpeed"), space)

    def loader_of(place: int) -> Any:
        return space["WdsLoader"](space["train_pipe"](), workers, seed=1, ranks=(place, 2))

    def batches(iterator: Any, count: int) -> list[list[tuple[int, bool]]]:
        taken = itertools.islice(iterator, count)
        return [list(zip(batch["label"].tolist(), batch["pad"].tolist(), strict=True)) for batch in taken]

    wholes = []
    for place in range(2):
        with loader_of(place) as loader:
            wholes.append(batches(space["endless"](loader), 21))
        for step, repeat, resume in (
            (4, Repeating, space["endless"]),
            (9, space["endless"], Repeating),
            (10, Repeating, Repeating),
        ):
            with loader_of(place) as loader:
                assert batches(repeat(loader), step) == wholes[place][:step]
                state = loader.state_dict()
            with loader_of(place) as loader:
                loader.load_state_dict(state)
                assert batches(resume(loader), 21 - step) == wholes[place][step:]
    check_epochs(wholes, workers)


def test_endless_iterator_says_that_it_has_ended_when_a_state_is_loaded_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not continue with the earlier batches."""
    make_shards(tmp_path)
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    exec(example("DeepSpeed"), space)
    loader = space["WdsLoader"](space["train_pipe"](), seed=1)
    repeating = Repeating(loader)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(RuntimeError, match="this iterator has ended, because the loader began another epoch, loaded a"):
        next(repeating)
