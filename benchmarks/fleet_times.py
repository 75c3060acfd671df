"""How long an actor takes for a batch of images, measured: decoded, cropped, resized and collated by the package."""

from __future__ import annotations

import random
from pathlib import Path
from time import thread_time

import numpy as np
from harness import ROOT  # first: the checkout that this script stands in is measured
from numpy.typing import NDArray
from PIL import Image
from shards import make_shards
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import wds_collate

__all__ = ["BATCH", "BATCH_BYTES", "QUANTILES", "measure_batches"]

assert ROOT

BATCH = 64  # images
SIDE = 224  # pixels of a crop
BATCH_BYTES = BATCH * SIDE * SIDE * 3
QUANTILES = np.linspace(0, 1, 11)


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
