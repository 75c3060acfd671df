"""Native pipes before, between and behind ours: nothing is lost, nothing comes twice."""

import csv
import io
from collections.abc import Iterator
from itertools import chain, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.servers import serve_folder
from tests.kits.shards import keys_of, text_keys, text_samples, write_tar, write_text_shards
from tests.kits.torchdata import SampleMultiplexer
from torchdata_wds import ShardMember, wds_collate

SIZES = (4, 0, 7, 3)
KEYS = text_keys(SIZES)
LABELS = [int(key[-5:]) % 10 for key in KEYS]
SECOND = [f"t-{number:05d}" for number in range(5)]

key_of = itemgetter("__key__")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four text shards of uneven length, one of them empty; one of another source; a table of labels."""
    folder = tmp_path_factory.mktemp("mixing")
    write_text_shards(folder, SIZES)
    (folder / "other").mkdir()
    write_tar(folder / "other" / "t.tar", text_samples("t-", len(SECOND)))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("key", "label"), *((key, f"label of {key}") for key in KEYS)])
    return folder


def urls(folder: Path) -> IterDataPipe[str]:
    return IterableWrapper([str(folder / "shard-*.tar")]).list_shards()


def first(folder: Path) -> IterDataPipe[Any]:
    """The samples of the four shards."""
    return urls(folder).load_wds_shards().group_by_key()


def second(folder: Path) -> IterDataPipe[Any]:
    """The samples of the other source."""
    return IterableWrapper([str(folder / "other" / "t.tar")]).load_wds_shards().group_by_key()


def is_no_json(member: ShardMember) -> bool:
    return not member.name.endswith(".json")


def twice(member: ShardMember) -> list[ShardMember]:
    return [member, member._replace(name=member.name + ".copy")]


def numbered(sample: dict[str, Any]) -> list[tuple[str, int]]:
    return [(sample["__key__"], number) for number in range(2)]


def is_odd(sample: dict[str, Any]) -> int:
    return int(sample["__key__"][-1]) % 2


def branches(folder: Path) -> list[tuple[str, int]]:
    """Two branches of one reading, joined again."""
    one, two = first(folder).fork(2, buffer_size=100)
    pairs = one.wds_to_tuple("__key__").zip(two.wds_decode().wds_to_tuple("cls"))
    return [(key, label) for (key,), (label,) in pairs]


def with_labels(folder: Path) -> IterDataPipe[Any]:
    """A csv file read by torchdata's parse_csv, looked up by key."""
    labels = IterableWrapper([str(folder / "labels.csv")]).open_files().parse_csv(skip_lines=1)
    return first(folder).zip_with_map(labels.to_map_datapipe(tuple), key_of)


def meeting(folder: Path) -> IterDataPipe[Any]:
    """Rows and samples that meet by key, however far apart."""
    labels = IterableWrapper([(key, key.upper()) for key in reversed(KEYS)])
    return first(folder).zip_with_iter(labels, key_fn=key_of, ref_key_fn=itemgetter(0), buffer_size=100)


def pairs_of(pipe: IterDataPipe[Any]) -> list[tuple[str | None, ...]]:
    return [tuple(sample and key_of(sample) for sample in pair) for pair in pipe]


def bucketed(folder: Path) -> list[str]:
    """Native batching of our tuples, then our collating."""
    pipe = first(folder).wds_to_tuple("__key__").bucketbatch(batch_size=3, drop_last=False, use_in_batch_shuffle=False)
    return sorted(key for (names,) in pipe.collate(wds_collate) for key in names)


#: What native stages make of our samples, members and shards, and what that must be.
NATIVE: dict[str, tuple[Any, Any]] = {
    "zip": (lambda f: pairs_of(first(f).zip(second(f))), list(zip(KEYS, SECOND, strict=False))),
    "zip with itself": (lambda f: pairs_of(first(f).zip(first(f))), list(zip(KEYS, KEYS, strict=True))),
    "zip_longest": (lambda f: pairs_of(first(f).zip_longest(second(f))), list(zip_longest(KEYS, SECOND))),
    "mux": (lambda f: keys_of(first(f).mux(second(f))), list(chain(*zip(KEYS, SECOND, strict=False)))),
    "mux_longest": (lambda f: sorted(keys_of(first(f).mux_longest(second(f)))), sorted(KEYS + SECOND)),
    "concat": (lambda f: keys_of(first(f).concat(second(f))), KEYS + SECOND),
    "zip_with_map": (
        lambda f: [(key_of(sample), label) for sample, label in with_labels(f)],
        [(key, f"label of {key}") for key in KEYS],
    ),
    "zip_with_iter": (
        lambda f: [(key_of(sample), row[1]) for sample, row in meeting(f)],
        [(key, key.upper()) for key in KEYS],
    ),
    "fork": (branches, list(zip(KEYS, LABELS, strict=True))),
    "demux": (
        lambda f: list(map(keys_of, first(f).demux(2, is_odd, buffer_size=100))),
        [[key for key in KEYS if int(key[-1]) % 2 == rest] for rest in (0, 1)],
    ),
    "cycle of samples": (lambda f: keys_of(first(f).cycle(2)), KEYS * 2),
    "cycle of shards": (lambda f: keys_of(urls(f).cycle(2).load_wds_shards().group_by_key()), KEYS * 2),
    "flatmap": (lambda f: list(first(f).flatmap(numbered)), [(key, number) for key in KEYS for number in range(2)]),
    "set_length": (lambda f: (len(first(f).set_length(14)), keys_of(first(f).set_length(14))), (14, KEYS)),
    "enumerate": (lambda f: [(n, key_of(sample)) for n, sample in first(f).enumerate()], list(enumerate(KEYS))),
    "add_index": (lambda f: [sample["index"] for sample in first(f).add_index()], list(range(len(KEYS)))),
    "header": (lambda f: keys_of(first(f).header(3)), KEYS[:3]),
    "slice": (lambda f: [row[0] for row in first(f).wds_to_tuple("__key__", "txt", "cls").slice(0, 1)], KEYS),
    "drop": (lambda f: [row[0] for row in first(f).wds_to_tuple("__key__", "txt", "cls").drop([1, 2])], KEYS),
    "map of a field": (lambda f: [sample["cls"] for sample in first(f).map(int, input_col="cls")], LABELS),
    "map of a place": (
        lambda f: [label for _, label in first(f).wds_to_tuple("__key__", "cls").map(int, input_col=1)],
        LABELS,
    ),
    "bucketbatch": (bucketed, sorted(KEYS)),
    "unbatch": (lambda f: keys_of(first(f).batch(4).unbatch()), KEYS),
}


@pytest.mark.parametrize("name", NATIVE)
def test_native_stages_take_our_samples(folder: Path, name: str) -> None:
    """Nothing is lost, nothing comes twice, and the next epoch is the same."""
    made, expected = NATIVE[name]
    assert made(folder) == made(folder) == expected


#: Ways to our samples by native stages: (path, stream) of other openers, streams inside archives, members passed on.
SAME: dict[str, Any] = {
    "open_files": lambda f: (
        IterableWrapper(sorted(IterableWrapper([str(f)]).list_files(masks="shard-*.tar").map(str)))
        .open_files(mode="b")
        .load_wds_shards()
    ),
    "load_from_tar": lambda f: urls(f).open_files(mode="b").load_from_tar(),
    "enumerate and prefetch": lambda f: urls(f).load_wds_shards().enumerate().map(itemgetter(1)).prefetch(2),
}


@pytest.mark.parametrize("name", SAME)
def test_samples_are_the_same_by_native_stages(folder: Path, name: str) -> None:
    """Keys and fields are ours all the same."""
    assert list(SAME[name](folder).group_by_key()) == list(first(folder))


def test_samples_group_when_members_are_filtered_or_multiplied(folder: Path) -> None:
    """Between loading and grouping, `.filter` sees `member.name`, and `.flatmap` may give several members for one."""
    samples = list(urls(folder).load_wds_shards().filter(is_no_json).group_by_key())
    expected = [{field: value for field, value in sample.items() if field != "json"} for sample in first(folder)]
    assert samples == expected
    samples = list(urls(folder).load_wds_shards().flatmap(twice).group_by_key())
    assert list(map(key_of, samples)) == KEYS
    assert all(sample["txt.copy"] == sample["txt"] and sample["cls.copy"] == sample["cls"] for sample in samples)


def test_sample_multiplexer_draws_from_both_when_sources_are_weighted(folder: Path) -> None:
    """By weights, each source in its order, none lost, the same for the same seed."""
    orders = [
        keys_of(SampleMultiplexer({first(folder): 0.7, second(folder): 0.3}, seed=seed).set_length(19))
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert [key for key in order if key[0] == "s"] == KEYS
        assert [key for key in order if key[0] == "t"] == SECOND


def test_shards_load_when_torchdata_opens_them_by_fsspec(folder: Path) -> None:
    """`open_files_by_fsspec` gives (url, stream), of any file system."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in urls(folder):
        memory.pipe(f"/mixing/{Path(path).name}", Path(path).read_bytes())
    pipe = IterableWrapper(["memory://mixing"]).list_files_by_fsspec().open_files_by_fsspec(mode="rb")
    assert sorted(keys_of(pipe.load_wds_shards().group_by_key())) == sorted(KEYS)


def test_shards_load_when_torchdata_reads_them_from_http(folder: Path) -> None:
    """`read_from_http` gives (url, stream)."""
    with serve_folder(folder) as server:
        pipe = IterableWrapper([f"{server}/{Path(path).name}" for path in urls(folder)]).read_from_http(timeout=10)
        samples = list(pipe.load_wds_shards().group_by_key())
    assert list(map(key_of, samples)) == KEYS
    assert {sample["__url__"].partition("shard")[0] for sample in samples} == {f"{server}/"}


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_prefetch_loses_nothing_when_it_stands_anywhere(folder: Path, place: int) -> None:
    """Before and behind loading, grouping and shuffling, over two epochs."""
    pipe: IterDataPipe[Any] = urls(folder)
    stages = ["load_wds_shards", "group_by_key", "wds_shuffle"]
    for number in range(4):
        pipe = pipe.prefetch(3) if number == place else pipe
        pipe = getattr(pipe, stages[number])() if number < 3 else pipe
    assert sorted(keys_of(pipe)) == sorted(keys_of(pipe)) == sorted(KEYS)


def test_prefetch_gives_all_samples_when_the_loop_was_left_early(folder: Path) -> None:
    """What the thread had read ahead is no part of the next epoch."""
    pipe = first(folder).prefetch(2)
    for _ in pipe:
        break
    assert keys_of(pipe) == KEYS


def test_repeat_keeps_readings_apart_when_each_shard_comes_twice_in_a_row(folder: Path) -> None:
    """A shard read twice in a row gives its samples twice, none merged, fused or not."""
    paths = urls(folder).repeat(2)
    expected = [key for number, size in enumerate(SIZES) for key in KEYS[sum(SIZES[:number]) :][:size] * 2]
    assert keys_of(paths.load_wds_shards().group_by_key()) == expected
    assert keys_of(paths.load_wds_shards().filter(is_no_json).group_by_key()) == expected


def test_repeat_keeps_readings_apart_when_a_shard_holds_one_sample(tmp_path: Path) -> None:
    """The last and the next first sample have one key then: they are two samples still."""
    (path,) = write_text_shards(tmp_path, (1,))
    pipe = IterableWrapper([path]).repeat(3).load_wds_shards()
    assert keys_of(pipe.group_by_key()) == keys_of(pipe.filter(is_no_json).group_by_key()) == ["s0-00000"] * 3


def test_in_memory_cache_gives_the_same_samples_when_iterated_again(folder: Path, tmp_path: Path) -> None:
    """The second epoch comes from memory: the shard may be gone."""
    path = tmp_path / "x.tar"
    write_tar(path, text_samples("x", 3))
    pipe = IterableWrapper([str(path)]).load_wds_shards().group_by_key().in_memory_cache(size=1)
    before = list(pipe)
    path.unlink()
    assert list(pipe) == before
    assert len(before) == 3


def test_mixed_sources_lose_nothing_when_two_workers_read_them(folder: Path) -> None:
    """Two branches, each with its own sharding filter, concatenated: each key once."""
    pipe = urls(folder).sharding_filter().load_wds_shards().group_by_key()
    other = IterableWrapper([str(folder / "other" / "t.tar")]).sharding_filter().load_wds_shards().group_by_key()
    loader = DataLoader(pipe.concat(other), batch_size=None, num_workers=2, collate_fn=key_of)
    assert sorted(loader) == sorted(KEYS + SECOND)


class Flaky:
    """A source of (url, stream) pairs that counts what was closed."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.open = 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for path in self.paths:
            file = _Counted(path, self)
            self.open += 1
            yield path, file


class _Counted:
    def __init__(self, path: str, owner: Flaky) -> None:
        self._file = io.BytesIO(Path(path).read_bytes())
        self._owner = owner

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        if not self._file.closed:
            self._owner.open -= 1
        self._file.close()


def test_streams_of_other_openers_are_closed_when_read_or_left(folder: Path) -> None:
    """The loader closes what it was given: at the shard's end, and when the loop breaks."""
    source = Flaky(list(urls(folder)))
    pipe = IterableWrapper(source, deepcopy=False).load_wds_shards().group_by_key()
    assert keys_of(pipe) == KEYS
    assert source.open == 0
    for _ in pipe:
        break
    del pipe
    assert source.open == 0
