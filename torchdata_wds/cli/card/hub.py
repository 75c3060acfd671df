"""What the front matter of a card says to the Hugging Face hub."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torchdata_wds.cli.card.field_kinds import Kind, kind_of
from torchdata_wds.cli.card.set_facts import SetFacts, content_bytes

TAG = "webdataset"
CONFIG = "default"
_DTYPES: dict[Kind, str] = {
    "image": "image",
    "audio": "audio",
    "video": "video",
    "mesh": "mesh",
    "text": "string",
    "integer": "int64",
    "bytes": "binary",
}
_STEPS = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
_DIGITS = re.compile(r"(\d+)")


def hub_values(facts: SetFacts, folder: Path | None) -> dict[str, Any]:
    """Returns the keys of the front matter that follow from the shards; `folder` has them unless they are remote."""
    splits = facts.by_split()
    sizes = {split: (content_bytes(shards), sum(shard.samples for shard in shards)) for split, shards in splits.items()}
    files = []
    for split, shards in splits.items():
        patterns = path_patterns([shard.path for shard in shards], folder)
        files.append({"split": split, "path": patterns[0] if len(patterns) == 1 else patterns})
    info: dict[str, Any] = {}
    if (features := declared_features(facts)) is not None:
        info["features"] = [{"name": name, "dtype": dtype} for name, dtype in features.items()]
    info["splits"] = [
        {"name": split, "num_bytes": size, "num_examples": samples} for split, (size, samples) in sizes.items()
    ]
    if (stored := facts.bytes) is not None:
        info["download_size"] = stored
    info["dataset_size"] = sum(size for size, _ in sizes.values())
    return {
        "size_categories": [size_category(facts.samples)],
        "configs": [{"config_name": CONFIG, "data_files": files}],
        "dataset_info": info,
    }


def declared_features(facts: SetFacts) -> dict[str, str] | None:
    """Returns the type of each field, for Hugging Face Datasets; None if the type of one shows only in its content."""
    types = {name: _DTYPES.get(kind_of(name)) for name in facts.fields}
    known = {name: dtype for name, dtype in types.items() if dtype is not None}
    return {**known, "__key__": "string", "__url__": "string"} if len(known) == len(types) else None


def size_category(samples: int) -> str:
    """Returns the hub's word for a number of samples.

    Example:
        >>> size_category(12), size_category(1000), size_category(5 * 10**12)
        ('n<1K', '1K<n<10K', 'n>1T')
    """
    reached = sum(samples >= 10**power for power in range(3, 3 + len(_STEPS)))
    if reached == 0:
        return f"n<{_STEPS[0]}"
    return f"n>{_STEPS[-1]}" if reached == len(_STEPS) else f"{_STEPS[reached - 1]}<n<{_STEPS[reached]}"


def path_patterns(paths: Sequence[str], folder: Path | None) -> list[str]:
    """Returns globs that match these paths and nothing else in the folder; the paths themselves where none does."""
    if folder is None:
        return list(paths)
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(_DIGITS.sub("0", path), []).append(path)
    return [pattern for group in alike.values() for pattern in _patterns_of(group, folder)]


def _patterns_of(paths: Sequence[str], folder: Path) -> Iterator[str]:
    """Yields one glob for paths that differ only in numbers, if it is exact."""
    columns = list(zip(*map(_DIGITS.split, paths), strict=True))
    glob = "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
    if len(paths) > 1 and {path.relative_to(folder).as_posix() for path in folder.glob(glob)} == set(paths):
        yield glob
    else:
        yield from paths
