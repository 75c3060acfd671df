"""One row per pipe: what every pipe must be able to do is tested over this table, and a missing row fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import msgpack
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import text_samples, write_tar
from torchdata_wds import ShardFormatError, ShardIndex, index_shard, wds_collate
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.tar.members import ShardMember

SAMPLES = [
    {"__key__": f"k{number}", "__url__": "x.tar", "txt": b"text", "cls": str(number).encode(), "jpg": b"\xff\xd8"}
    for number in range(12)
]
VALUES = [{"__key__": f"k{number}", "__url__": "x.tar", "txt": "text", "cls": number} for number in range(12)]
DOCUMENTS = [
    {
        "__key__": f"d{number}",
        "__url__": "x.tar",
        "json": {"text_list": ["text"], "image_info": [{"image_name": "a.png", "matched_text_index": 0}]},
        "a.jpg": b"\xff\xd8",
    }
    for number in range(12)
]
NO_IMAGE = {field: value for field, value in DOCUMENTS[0].items() if field != "a.jpg"} | {"__key__": "e"}
NO_VALUE = [{"__key__": "a", "__url__": "x.tar", "cls": None}, VALUES[0]]
TUPLES = [(number, str(number)) for number in range(12)]


class Row(NamedTuple):
    """How to make one pipe.

    Attributes:
        make: Builds the pipe; the folder holds shards 0.tar to 2.tar of four samples each, and is for its use.
        count: How many items an epoch gives.
        random: Whether the order differs from epoch to epoch.
        opens: Whether it opens files.
        bad: Builds the pipe over one good item and one that fails, with the handler given; None where nothing can fail
            through a handler.
        error: What that failure raises.
    """

    make: Callable[[Path], IterDataPipe[Any]]
    count: int
    random: bool = False
    opens: bool = False
    bad: Callable[[Path, Any], IterDataPipe[Any]] | None = None
    error: type[Exception] | tuple[type[Exception], ...] = Exception


def shards(folder: Path) -> list[str]:
    """Three shards of four samples each."""
    paths = [folder / f"{number}.tar" for number in range(3)]
    if not paths[0].exists():
        for number, path in enumerate(paths):
            write_tar(path, text_samples(f"s{number}-", 4))
    return [str(path) for path in paths]


def record_shards(folder: Path, kind: str) -> list[str]:
    """Three record shards of four records each."""
    paths = [folder / f"{number}.{kind}" for number in range(3)]
    dumps = cbor2.dumps if kind == "cbor" else msgpack.packb
    for number, path in enumerate(paths):
        path.write_bytes(b"".join(dumps(value) for value in VALUES[4 * number : 4 * number + 4]))
    return [str(path) for path in paths]


def load_records(urls: list[str], kind: str, **options: Any) -> IterDataPipe[Any]:
    """The pipe that loads record shards of a kind."""
    return getattr(items(urls), f"load_{kind}_shards")(**options)


def items(values: list[Any]) -> IterDataPipe[Any]:
    """A source of these values."""
    return IterableWrapper(values)


def twice(stream: Iterator[Any], times: int = 2) -> Iterator[Any]:
    """A stage for wds_compose."""
    for item in stream:
        for _ in range(times):
            yield item


def number_of(sample: dict[str, Any]) -> int:
    """A function for wds_map."""
    return int(sample["cls"])


def _missing(folder: Path) -> list[str]:
    return [str(folder / "missing.tar"), shards(folder)[0]]


def _other_sample(folder: Path, **options: Any) -> IterDataPipe[Any]:
    """A shard whose first sample has another key than its index says."""
    header, rows = (index := index_shard(shards(folder)[0], to=False)).header, index.dump().splitlines()[1:]
    path = folder / "other.tar"
    write_tar(path, [("s9-0.txt", b"text"), *text_samples("s0-", 4)[1:]])
    index = ShardIndex(header._replace(bytes=None, tag=""), rows)
    return items([str(path)]).load_in_order(index=DatasetIndex.of([(str(path), index)]), **options)


BAD_FIELD = [{"__key__": "a", "__url__": "x.tar", "txt": b"\xff", "cls": b"no number"}, SAMPLES[0]]
NO_FIELD = [{"__key__": "a", "__url__": "x.tar"}, SAMPLES[0]]
MEMBERS = [
    ShardMember("x.tar", name, b"1") for name in ("a.txt", "a.txt", "b.txt", "b.cls", "c.txt", "d.txt", "e.txt", "f.x")
]

ROWS: dict[str, Row] = {
    "list_shards": Row(lambda folder: items([str(folder / "{0..2}.tar")]).list_shards(), 3),
    "resample_shards": Row(lambda folder: items(shards(folder)).resample_shards(9, replacement=False), 9, random=True),
    "split_shards": Row(
        lambda folder: items(shards(folder)).split_shards({f"{number}.tar": 4 for number in range(3)}, even="drop"), 3
    ),
    "cache_shards": Row(
        lambda folder: items(shards(folder)).cache_shards(folder / "cache", cache_local=True),
        3,
        bad=lambda folder, handler: items([3, shards(folder)[0]]).cache_shards(folder / "cache", handler=handler),
        error=ValueError,
    ),
    "load_wds_shards": Row(
        lambda folder: items(shards(folder)).load_wds_shards(),
        36,
        opens=True,
        bad=lambda folder, handler: items(_missing(folder)).load_wds_shards(handler=handler),
        error=OSError,
    ),
    "load_in_order": Row(
        lambda folder: items(shards(folder)).load_in_order(shuffle=False),
        12,
        opens=True,
        bad=lambda folder, handler: _other_sample(folder, shuffle=False, handler=handler),
        error=ShardFormatError,
    ),
    "group_by_key": Row(
        lambda folder: items(shards(folder)).load_wds_shards().group_by_key(),
        12,
        opens=True,
        bad=lambda folder, handler: items(MEMBERS).group_by_key(handler=handler),
        error=ValueError,
    ),
    "wds_shuffle": Row(lambda folder: items(SAMPLES).wds_shuffle(5, initial=2), 12, random=True),
    "wds_decode": Row(
        lambda folder: items(SAMPLES).wds_decode(),
        12,
        bad=lambda folder, handler: items(BAD_FIELD).wds_decode(handler=handler),
        error=ValueError,
    ),
    "wds_interleaved": Row(
        lambda folder: items(DOCUMENTS).wds_interleaved(),
        12,
        bad=lambda folder, handler: items([NO_IMAGE, *DOCUMENTS]).wds_interleaved(handler=handler),
        error=ValueError,
    ),
    "wds_rename": Row(
        lambda folder: items(SAMPLES).wds_rename(label="cls"),
        12,
        bad=lambda folder, handler: items(NO_FIELD).wds_rename(label="cls", handler=handler),
        error=ValueError,
    ),
    "wds_map_dict": Row(
        lambda folder: items(SAMPLES).wds_map_dict(cls=int),
        12,
        bad=lambda folder, handler: items(BAD_FIELD).wds_map_dict(cls=int, handler=handler),
        error=ValueError,
    ),
    "wds_rename_keys": Row(
        lambda folder: items(SAMPLES).wds_rename_keys(("label", "cl*")),
        12,
        bad=lambda folder, handler: items(NO_FIELD).wds_rename_keys(label="cls", handler=handler),
        error=ValueError,
    ),
    "wds_to_tuple": Row(
        lambda folder: items(SAMPLES).wds_to_tuple("__key__", "cls"),
        12,
        bad=lambda folder, handler: items(NO_FIELD).wds_to_tuple("cls", handler=handler),
        error=ValueError,
    ),
    "wds_extract_keys": Row(
        lambda folder: items(SAMPLES).wds_extract_keys("*.cls", "*.jpg;*.png"),
        12,
        bad=lambda folder, handler: items(NO_FIELD).wds_extract_keys("cls", handler=handler),
        error=ValueError,
    ),
    "wds_map_tuple": Row(
        lambda folder: items(TUPLES).wds_map_tuple(None, int),
        12,
        bad=lambda folder, handler: items([("x",), ("1",)]).wds_map_tuple(int, handler=handler),
        error=ValueError,
    ),
    "wds_map": Row(
        lambda folder: items(SAMPLES).wds_map(number_of),
        12,
        bad=lambda folder, handler: items(BAD_FIELD).wds_map(number_of, handler=handler),
        error=ValueError,
    ),
    "wds_encode": Row(
        lambda folder: items(VALUES).wds_encode(),
        12,
        bad=lambda folder, handler: items(NO_VALUE).wds_encode(handler=handler),
        error=ValueError,
    ),
    "save_wds_shards": Row(
        lambda folder: items(VALUES).save_wds_shards(f"{folder}/saved-%d.tar", max_count=5, overwrite=True),
        3,
        opens=True,
        bad=lambda folder, handler: items(NO_VALUE).save_wds_shards(f"{folder}/bad-%d.tar", handler=handler),
        error=ValueError,
    ),
    "wds_compose": Row(lambda folder: items(SAMPLES).wds_compose(twice, times=3), 36),
    "wds_unbatch": Row(lambda folder: items(TUPLES).batch(5).collate(wds_collate).wds_unbatch(), 12),
    "wds_mix": Row(lambda folder: items(SAMPLES).wds_mix(items(VALUES), weights=(1, 2), stop="all"), 24, random=True),
    "wds_epoch": Row(lambda folder: items(SAMPLES).wds_epoch(12), 12),
    "cache_samples": Row(
        lambda folder: items(VALUES).cache_samples(folder / "cache.db"),
        12,
        opens=True,
        bad=lambda folder, handler: items([object(), VALUES[0]]).cache_samples(folder / "bad.db", handler=handler),
        error=ValueError,
    ),
    **{
        f"load_{kind}_shards": Row(
            lambda folder, kind=kind: load_records(record_shards(folder, kind), kind),
            12,
            opens=True,
            bad=lambda folder, handler, kind=kind: load_records(
                [str(folder / "missing"), *record_shards(folder, kind)], kind, handler=handler
            ),
            error=OSError,
        )
        for kind in ("cbor", "msgpack")
    },
    "join_workers": Row(lambda folder: items(SAMPLES).join_workers(), 12),
}
