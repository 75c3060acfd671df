"""Arguments of webdataset's own ``WebDataset``: those with another name here, and those whose place is elsewhere."""

from __future__ import annotations

from typing import Any

__all__ = ["check_mode", "check_place_elsewhere", "either"]

_SEED = (
    "orders follow the loader's seed: DataLoader2(pipe, reading_service=WorkersReadingService(n, seed=s)), "
    "loader.seed(s), or torch.manual_seed(s) for torch's DataLoader"
)
_SPLITTER = (
    "shards are divided by .sharding_filter(), among the workers of any loader, and among ranks by torch's DataLoader "
    "and WorkersReadingService(n, distributed=True). For another division chain the forms, with .split_shards(), "
    ".resample_shards() or a filter of yours in its place"
)
#: What to write where an argument asks for something that is not done by this function.
_INSTEAD = {
    "detshuffle": _SEED,
    "empty_check": (
        "a pattern that matches nothing raises in any case, and a worker without shards is not an error: leave it out"
    ),
    "nodesplitter": _SPLITTER,
    "repeat": "chain .cycle(n) for n passes, or .wds_epoch(n) for epochs of n samples without end",
    "seed": _SEED,
    "workersplitter": _SPLITTER,
}
#: Functions of webdataset that divide shards as is done here.
_SPLITTERS = ("single_node_only", "split_by_node", "split_by_worker")


def check_place_elsewhere(**given: Any) -> None:
    """Refuses what these arguments ask for, unless that is what is done anyway.

    Raises:
        ValueError: names the first of them, and the form to write.

    Example:
        >>> check_place_elsewhere(repeat=False, seed=None)
        >>> try:
        ...     check_place_elsewhere(repeat=True)
        ... except ValueError as error:
        ...     print(str(error).partition(":")[0])
        WebDataset does not take repeat=True here
    """
    for name, value in given.items():
        if value is not None and value is not False and getattr(value, "__name__", None) not in _SPLITTERS:
            raise ValueError(f"WebDataset does not take {name}={value!r} here: {_INSTEAD[name]}")


def check_mode(mode: str | None) -> bool:
    """Returns whether a mode asks for resampling.

    Raises:
        ValueError: if it is not a mode.
    """
    if mode not in (None, "resampled"):
        raise ValueError(f"mode must be None or 'resampled', which is resampled=True, not {mode!r}")
    return mode is not None


def either(name: str, value: Any, other: str, same: Any) -> Any:
    """Returns the value that was given under one of two names.

    Raises:
        ValueError: if it was given under both.
    """
    if value is not None and same is not None:
        raise ValueError(f"{name} and {other} are the same argument: give one of them")
    return same if value is None else value
