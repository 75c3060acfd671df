"""The demo's training loop, whose batches it counts."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from torchdata_wds.cli.terminal import Progress
from torchdata_wds.codecs import IMAGE_FIELDS
from torchdata_wds.datasets.webdataset import WebDataset
from torchdata_wds.handlers import warn_and_continue
from torchdata_wds.pipes.base import WdsPipe
from torchdata_wds.pipes.samples.collate import wds_collate
from torchdata_wds.workers.loader import WdsLoader

_BATCH = 64
_BUFFER, _BUFFER_BYTES = 1000, 256 << 20  # users' samples may be large
_SIDE = 96


def read_epoch(pipe: WdsPipe[Any], workers: int, total: int) -> tuple[Counter[tuple[str, str]], float, float]:
    """Counts an epoch's samples by URL and key; measures the seconds to its last and first batch, start-up included."""
    samples: Counter[tuple[str, str]] = Counter()
    first = 0.0
    with WdsLoader(pipe, workers) as loader, Progress("samples", total) as bar:
        start = time.perf_counter()
        for urls, keys, *_ in loader:
            first = first or time.perf_counter() - start
            samples.update(zip(urls, keys, strict=True))
            bar.advance(len(keys))
        return samples, time.perf_counter() - start, first


def build_pipe(patterns: Sequence[str], fields: Counter[str]) -> WdsPipe[Any]:
    """Builds the demo's graph: the usual one, with stages for images and labels where there are such fields."""
    images = [field for field in fields if field.rpartition(".")[2] in IMAGE_FIELDS]
    chosen = ([";".join(images)] if images else []) + (["cls"] if "cls" in fields else [])
    pipe = WebDataset(patterns).wds_shuffle(_BUFFER, max_bytes=_BUFFER_BYTES)
    if chosen:
        pipe = pipe.wds_decode("pil", only=[*images, "cls"], handler=warn_and_continue)
    pipe = pipe.wds_to_tuple("__url__", "__key__", *chosen, missing="none")
    if images:
        pipe = pipe.wds_map_tuple(None, None, augment)
    return pipe.batch(_BATCH).collate(wds_collate)


def augment(image: Image.Image | None) -> torch.Tensor | None:
    """Mirrors about half of the images and resizes all to one size; a sample without an image keeps None."""
    if image is None:
        return None
    image = ImageOps.mirror(image) if random.random() < 0.5 else image
    pixels = np.asarray(image.resize((_SIDE, _SIDE)), dtype=np.float32) / 255
    return torch.from_numpy(pixels).permute(2, 0, 1)
