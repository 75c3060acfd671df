"""Reads a data set by the files of ``wds card``, as a program: with Hugging Face Datasets, mlcroissant and energon.

It runs where those are installed, needs nothing of ours, and writes what it found as JSON: ``program READER FOLDER``.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Bytes as their digest, which JSON can have."""
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def copied(folder: str) -> str:
    """A folder with nothing but the shards: without a card, datasets takes each file for one."""
    copy = tempfile.mkdtemp()
    for shard in Path(folder).rglob("*.tar"):
        shutil.copy(shard, copy)
    return copy


def read_hub(folder: str) -> dict[str, Any]:
    """All samples by the card and by the shards alone, images as they are stored."""
    from datasets import Image, load_dataset
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    def samples(loaded: Any) -> dict[str, list[Any]]:
        found = {}
        for split, rows in loaded.items():
            for name, feature in rows.features.items():
                if isinstance(feature, Image):
                    rows = rows.cast_column(name, Image(decode=False))
            rows = rows.remove_columns("__url__")
            found[split] = [
                {name: item["bytes"] if name == "jpg" else item for name, item in row.items()} for row in rows
            ]
        return found

    def attempt(*arguments: Any, **options: Any) -> Any:
        try:
            return samples(load_dataset(*arguments, **options))
        except ValueError as error:
            return str(error)

    lists = {name: getattr(WebDataset, f"{name}_EXTENSIONS") for name in ("IMAGE", "AUDIO", "VIDEO", "MESH")}
    return {
        "card": attempt(folder),
        "bare": attempt("webdataset", data_dir=copied(folder)),
        "suffixes": {**lists, "DECODED": sorted(WebDataset.DECODERS)},
    }


def read_croissant(folder: str) -> dict[str, Any]:
    """All records of all record sets, images by their size, and what the validation says."""
    import mlcroissant

    data = mlcroissant.Dataset(jsonld=f"{folder}/croissant.json")
    sets = {}
    for found in data.metadata.record_sets:
        rows = [[row[f"{found.uuid}/key"], row[f"{found.uuid}/content"]] for row in data.records(found.uuid)]
        sets[found.uuid] = sorted([key.decode(), getattr(content, "size", content)] for key, content in rows)
    return {"sets": sets, "errors": list(data.metadata.ctx.issues.errors)}


def read_energon(folder: str) -> dict[str, Any]:
    """The samples of both splits, and what ``energon prepare`` writes for a copy of the shards."""
    from megatron import energon
    from megatron.energon.flavors import BaseWebdatasetFactory

    @energon.stateless
    def cook(sample: dict[str, Any]) -> dict[str, Any]:
        return sample

    class Encoder(energon.DefaultTaskEncoder):
        cookers = [energon.Cooker(cook)]  # noqa: RUF012 - as energon wants it

    def keys(split: str) -> list[Any]:
        config = energon.WorkerConfig(rank=0, world_size=1, num_workers=0)
        data = energon.get_val_dataset(
            folder, split_part=split, batch_size=None, worker_config=config, task_encoder=Encoder()
        )
        samples = list(energon.get_loader(data))
        if isinstance(samples[0], dict):
            return [[sample["__key__"], sample["cls"], list(sample["jpg"].shape)] for sample in samples]
        return [[sample.__key__, sample.label, list(sample.image.shape)] for sample in samples]

    found = {split: keys(split) for split in ("train", "val")}
    copy = copied(folder)
    shards = sorted(path.name for path in Path(copy).iterdir())
    parts = [("train", "train-.*"), ("val", "val-.*")]
    BaseWebdatasetFactory.prepare_dataset(
        Path(copy), shards, split_parts_patterns=parts, split_parts_ratio=None, shuffle_seed=None, workers=1
    )
    return {"samples": found, "prepared": copy}


if __name__ == "__main__":
    readers = {"hub": read_hub, "croissant": read_croissant, "energon": read_energon}
    result = readers[sys.argv[1]](sys.argv[2])
    sys.stdout.write("\n" + json.dumps(plain(result)))
