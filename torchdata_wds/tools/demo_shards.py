"""The demo's own shards: generated images, written with the standard library."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["SIZES", "write_shards"]

#: Samples per shard: uneven, so that the workers' parts differ in length.
SIZES = (131, 64, 97, 150, 12, 118, 83, 129)

_WIDTH, _HEIGHT = 160, 120
_CLASSES = 10


def write_shards(folder: Path) -> str:
    """Writes the shards.

    Args:
        folder: An existing folder.

    Returns:
        The pattern that lists them.
    """
    number = 0
    for index, size in enumerate(SIZES):
        with tarfile.open(folder / f"demo-{index:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                _add_sample(tar, number)
                number += 1
    return str(folder / f"demo-{{000..{len(SIZES) - 1:03d}}}.tar")


def _add_sample(tar: tarfile.TarFile, number: int) -> None:
    label = number % _CLASSES
    fields = {
        "cls": str(label).encode(),
        "jpg": _make_jpeg(number),
        "json": json.dumps({"number": number, "label": label}).encode(),
    }
    for field, data in fields.items():
        info = tarfile.TarInfo(f"sample-{number:06d}.{field}")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))


def _make_jpeg(number: int) -> bytes:
    """A smooth image with some noise: coarse random colours, enlarged."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = smooth + rng.integers(-8, 9, smooth.shape, dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()
