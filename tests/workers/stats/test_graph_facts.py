"""What is found out about a graph."""

import os
from functools import partial
from typing import Any

import numpy as np
import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WdsLoader, WebDataset, image_decoder, wds_collate
from torchdata_wds.workers.stats.graph_facts import graph_facts, machine_load


def resized(image: Any, size: int) -> Any:
    return image.resize((size, size))


class Composed:
    """As torchvision's Compose."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        return value


class RandomResizedCrop:
    def __call__(self, value: Any) -> Any:
        return value


def test_facts_are_those_of_the_stages(tmp_path: Any) -> None:
    """Options of loaders, caches, decoders and functions."""
    plain = graph_facts([WebDataset("a.tar")])
    assert {plain[name] for name in ("read_ahead", "caches", "batches", "images", "arrays", "shrinks")} == {0}
    pipe = WebDataset("a.tar", decoder="rgb8", read_ahead=3, cache_dir=tmp_path, extensions="jpg").batch(4)
    assert [graph_facts([found])["collates"] for found in (pipe, pipe.collate(wds_collate))] == [0, 1]
    facts = graph_facts([pipe])
    assert [facts[name] for name in ("read_ahead", "caches", "batches", "images", "arrays")] == [3, 1, 1, 1, 1]
    assert not facts["limits"]
    assert not facts["shrinks"]


def test_decoders_have_limits_when_all_of_them_have() -> None:
    """And PIL images are not for simplejpeg."""
    limited = WebDataset("a.tar").wds_decode(image_decoder("pil", max_size=9))
    assert [graph_facts([limited])[name] for name in ("images", "arrays", "limits")] == [1, 0, 1]
    assert not graph_facts([limited.wds_decode("rgb8")])["limits"]


def test_functions_that_shrink_images_are_found() -> None:
    """In partials, lists and composed transforms."""
    pipe = WebDataset("a.tar", decoder="pil", extensions="jpg cls")
    assert not graph_facts([pipe.wds_map(len)])["shrinks"]
    assert graph_facts([pipe.wds_map(partial(resized, size=9))])["shrinks"]
    assert graph_facts([pipe.wds_map_tuple(Composed(str, RandomResizedCrop()), None)])["shrinks"]


def test_graph_of_native_stages_has_no_facts_that_advise() -> None:
    """Nothing of ours is in it."""
    facts = graph_facts([IterableWrapper(range(3)).shuffle()])
    assert not any(facts[name] for name in facts if name not in ("limits", "simplejpeg", "isal"))


def test_load_of_the_machine_is_a_number_of_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 where the system does not tell."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "getloadavg", lambda: (6.0, 0.0, 0.0))
    assert machine_load() == 150

    def fail() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr(os, "getloadavg", fail)
    assert machine_load() == 0


class Odd(IterDataPipe):
    """A user's pipe, whose attributes are called as some of ours."""

    read_ahead = "much"

    def __init__(self) -> None:
        self.cache = np.arange(3)

    def __iter__(self) -> Any:
        yield 1

    @property
    def batch_size(self) -> int:
        raise RuntimeError("not known yet")


def test_users_pipes_do_not_keep_a_loader_from_running() -> None:
    """Facts of an odd graph are unknown."""
    assert graph_facts([Odd()]) == {}
    assert list(WdsLoader(Odd())) == [1]
