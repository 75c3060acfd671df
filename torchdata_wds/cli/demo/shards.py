"""The demo's own shards: generated images, written with the standard library."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from torchdata_wds.cli.command import UsageError
from torchdata_wds.storage.urls import local_path, mask_url, scheme_of

__all__ = ["SIZES", "keep_shards", "write_shards"]


#: Samples per shard: uneven, so that the workers' parts differ in length.
SIZES = (131, 64, 97, 150, 12, 118, 83, 129)

_NAME = "train"

_SIGNS = frozenset("{}*?[]")  # of patterns

_WIDTH, _HEIGHT = 160, 120

_CLASSES = 10


def keep_shards(name: str, *, overwrite: bool = False) -> str:
    """Writes the shards where they are to stay, all of them or none.

    Args:
        name: What their names begin with, before ``-000000.tar``; for a folder, one that exists or ends in ``/``, that
            is ``train`` in the folder.
        overwrite: Whether to replace shards that exist.

    Returns:
        The pattern that lists them.

    Raises:
        UsageError: if the name is not that of a local file, or would be taken for a pattern.
        FileExistsError: if one of them exists.
    """
    if scheme_of(name) not in ("", "file") or not name or not _SIGNS.isdisjoint(name):
        raise UsageError(
            f"--keep takes a local folder, or what the names begin with, without {' '.join(sorted(_SIGNS))}; "
            f"not {mask_url(name)!r}"
        )
    path = Path(local_path(name))
    if name.endswith("/") or path.is_dir():
        path /= _NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [_shard_name(path.name, index) for index in range(len(SIZES))]
    there = [path.with_name(name) for name in names if os.path.lexists(path.with_name(name))]
    if there and not overwrite:
        raise FileExistsError(f"{there[0]} already exists: pass another name, or --force to replace it")
    # beside their place, and renamed in the end: an interrupted demo leaves no part of them
    with tempfile.TemporaryDirectory(prefix=".wds-demo-", dir=path.parent) as folder:
        write_shards(Path(folder), path.name)
        for name in names:
            Path(folder, name).replace(path.with_name(name))
    return _pattern(path)


def write_shards(folder: Path, name: str = _NAME) -> str:
    """Writes the shards.

    Args:
        folder: An existing folder.
        name: What their names begin with.

    Returns:
        The pattern that lists them.
    """
    number = 0
    for index, size in enumerate(SIZES):
        with tarfile.open(folder / _shard_name(name, index), "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(size):
                _add_sample(tar, number)
                number += 1
    return _pattern(folder / name)


def _shard_name(name: str, index: int) -> str:
    return f"{name}-{index:06d}.tar"


def _pattern(path: Path) -> str:
    return f"{path}-{{000000..{len(SIZES) - 1:06d}}}.tar"


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
