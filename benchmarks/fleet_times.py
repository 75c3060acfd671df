"""What `fleet.py` measures: how long an actor takes for a batch of images, and how long a real trainer waits."""

from __future__ import annotations

import random
import time
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from harness import ROOT  # first: the checkout that this script stands in is measured
from numpy.typing import NDArray
from PIL import Image
from shards import make_shards
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import RayPool, WdsLoader, wds_collate

__all__ = ["ITEM_TIMES", "QUANTILES", "measure_batches", "measure_waiting"]

assert ROOT

BATCH = 64  # images
SIDE = 224  # pixels of a crop
QUANTILES = np.linspace(0, 1, 11)
ITEM_TIMES = (0.05, 0.08, 0.08, 0.08, 0.21)  # seconds of an item that is slept for


def crop(image: Image.Image) -> NDArray[np.uint8]:
    """A random part of an image, resized, as image classifiers are trained with."""
    scale = random.uniform(0.08, 1) ** 0.5
    width, height = (max(int(side * scale), 1) for side in image.size)
    left, top = random.randint(0, image.width - width), random.randint(0, image.height - height)
    box = (left, top, left + width, top + height)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box))


def measure_batches(folder: Path, *, quick: bool) -> NDArray[np.float64]:
    """Returns the quantiles (`QUANTILES`) of the CPU time of a batch, in seconds.

    CPU time, because other programs have less influence on it: it is what the batch takes on a core of its own. The
    first epoch is not counted.
    """
    paths = make_shards("images", folder, quick=quick).paths
    size = 4 if quick else BATCH
    graph = (
        IterableWrapper([*map(str, paths)]).list_shards().load_wds_shards().group_by_key()
        .wds_decode("pil").wds_to_tuple("jpg", "cls").wds_map_tuple(crop, None)
        .batch(size, drop_last=True).collate(wds_collate)
    )  # fmt: skip
    random.seed(0)
    times: list[float] = []
    for epoch in range(1 if quick else 4):
        begun = thread_time()
        for _ in graph:
            now = thread_time()
            if epoch or quick:
                times.append((now - begun) * BATCH / size)
            begun = now
    return np.quantile(times, QUANTILES)


def sleep(number: int) -> int:
    """An item that takes one of `ITEM_TIMES`, and no CPU."""
    time.sleep(random.Random(number).choice(ITEM_TIMES))
    return number


def measure_waiting(actors: int, step: float, steps: int) -> float:
    """Returns the share of time in which one trainer waits for actors of a cluster on this machine.

    It sleeps for each step, and so do the actors for each item. The first items are not counted.
    """
    warm = 4 * actors
    graph: Any = IterableWrapper(range(warm + steps), deepcopy=False).sharding_filter().map(sleep)
    trained = 0.0
    with WdsLoader(graph, actors, pool=RayPool()) as loader:
        begun = perf_counter()
        for number, _ in enumerate(loader):
            if number == warm:
                begun, trained = perf_counter(), 0.0
            now = perf_counter()
            time.sleep(step)
            trained += perf_counter() - now
        return 1 - trained / (perf_counter() - begun)
