"""Native pipes before, between and behind ours: nothing is lost, nothing comes twice."""

import csv
import io
from collections import Counter
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torchdata.datapipes.iter
from torch.utils.data import DataLoader, IterDataPipe
from torchdata.datapipes.iter import IterableWrapper, SampleMultiplexer

from tests.kits.servers import serve_folder
from tests.kits.shards import text_keys, text_samples, write_tar, write_text_shards
from torchdata_wds import ShardMember, wds_collate

assert torchdata.datapipes.iter

SIZES = (4, 0, 7, 3)
KEYS = text_keys(SIZES)
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


def keys(pipe: IterDataPipe[Any]) -> list[str]:
    return list(map(key_of, pipe))


def test_zip_pairs_two_sources_when_one_is_shorter(folder: Path) -> None:
    """Item by item, to the end of the shorter; a branch with itself pairs each sample with its double."""
    assert [(key_of(one), key_of(two)) for one, two in first(folder).zip(second(folder))] == list(
        zip(KEYS, SECOND, strict=False)
    )
    assert [(key_of(one), key_of(two)) for one, two in first(folder).zip(first(folder))] == list(
        zip(KEYS, KEYS, strict=True)
    )


def test_zip_longest_keeps_all_when_one_source_is_shorter(folder: Path) -> None:
    """The shorter source is filled up."""
    rows = list(first(folder).zip_longest(second(folder)))
    assert [key_of(one) for one, _ in rows] == KEYS
    assert [key_of(two) for _, two in rows if two is not None] == SECOND


def test_mux_takes_turns_when_sources_are_mixed(folder: Path) -> None:
    """One of each in turn, until one ends."""
    assert keys(first(folder).mux(second(folder))) == [key for pair in zip(KEYS, SECOND, strict=False) for key in pair]


def test_mux_longest_keeps_all_when_sources_differ_in_length(folder: Path) -> None:
    """Every sample of both comes once."""
    assert Counter(keys(first(folder).mux_longest(second(folder)))) == Counter(KEYS + SECOND)


def test_concat_reads_one_source_behind_the_other(folder: Path) -> None:
    """In order, twice."""
    pipe = first(folder).concat(second(folder))
    assert keys(pipe) == keys(pipe) == KEYS + SECOND


def test_zip_with_map_adds_labels_when_they_come_from_a_table(folder: Path) -> None:
    """A csv file read by torchdata's parse_csv, looked up by key."""
    labels = IterableWrapper([str(folder / "labels.csv")]).open_files().parse_csv(skip_lines=1)
    pipe = first(folder).zip_with_map(labels.to_map_datapipe(tuple), key_of)
    assert [(key_of(sample), label) for sample, label in pipe] == [(key, f"label of {key}") for key in KEYS]


def test_zip_with_iter_adds_labels_when_they_come_in_another_order(folder: Path) -> None:
    """Rows and samples meet by key, however far apart."""
    labels = IterableWrapper([(key, key.upper()) for key in reversed(KEYS)])
    pipe = first(folder).zip_with_iter(labels, key_fn=key_of, ref_key_fn=itemgetter(0), buffer_size=100)
    assert [(key_of(sample), row[1]) for sample, row in pipe] == [(key, key.upper()) for key in KEYS]


def test_sample_multiplexer_draws_from_both_when_sources_are_weighted(folder: Path) -> None:
    """By weights, each source in its order, none lost, the same for the same seed."""
    orders = [
        keys(SampleMultiplexer({first(folder): 0.7, second(folder): 0.3}, seed=seed).set_length(19))
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert [key for key in order if key[0] == "s"] == KEYS
        assert [key for key in order if key[0] == "t"] == SECOND


def test_shards_load_when_torchdata_opens_local_files(folder: Path) -> None:
    """`open_files(mode="b")` gives (path, stream)."""
    paths = IterableWrapper([str(folder)]).list_files(masks="shard-*.tar").map(str)
    samples = list(IterableWrapper(sorted(paths)).open_files(mode="b").load_wds_shards().group_by_key())
    assert samples == list(first(folder))


def test_shards_load_when_torchdata_opens_them_by_fsspec(folder: Path) -> None:
    """`open_files_by_fsspec` gives (url, stream), of any file system."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for path in urls(folder):
        memory.pipe(f"/mixing/{Path(path).name}", Path(path).read_bytes())
    pipe = IterableWrapper(["memory://mixing"]).list_files_by_fsspec().open_files_by_fsspec(mode="rb")
    assert sorted(keys(pipe.load_wds_shards().group_by_key())) == sorted(KEYS)


def test_shards_load_when_torchdata_reads_them_from_http(folder: Path) -> None:
    """`read_from_http` gives (url, stream)."""
    with serve_folder(folder) as server:
        pipe = IterableWrapper([f"{server}/{Path(path).name}" for path in urls(folder)]).read_from_http(timeout=10)
        samples = list(pipe.load_wds_shards().group_by_key())
    assert list(map(key_of, samples)) == KEYS
    assert {sample["__url__"].partition("shard")[0] for sample in samples} == {f"{server}/"}


def test_samples_group_when_torchdata_loads_the_archives(folder: Path) -> None:
    """`load_from_tar` gives (path inside the archive's path, stream): keys and fields are ours all the same."""
    assert list(urls(folder).open_files(mode="b").load_from_tar().group_by_key()) == list(first(folder))


def is_no_json(member: ShardMember) -> bool:
    return not member.name.endswith(".json")


def twice(member: ShardMember) -> list[ShardMember]:
    return [member, member._replace(name=member.name + ".copy")]


def test_samples_group_when_members_are_filtered(folder: Path) -> None:
    """`.filter` between loading and grouping sees `member.name`; what it leaves out is missing and nothing else."""
    samples = list(urls(folder).load_wds_shards().filter(is_no_json).group_by_key())
    expected = [{field: value for field, value in sample.items() if field != "json"} for sample in first(folder)]
    assert samples == expected


def test_samples_group_when_members_are_multiplied(folder: Path) -> None:
    """`.flatmap` may give several members for one."""
    samples = list(urls(folder).load_wds_shards().flatmap(twice).group_by_key())
    assert list(map(key_of, samples)) == KEYS
    assert all(sample["txt.copy"] == sample["txt"] and sample["cls.copy"] == sample["cls"] for sample in samples)


def test_samples_group_when_members_pass_other_native_stages(folder: Path) -> None:
    """`.map`, `.prefetch` and `.enumerate` with its undoing, between loading and grouping."""
    pipe = urls(folder).load_wds_shards().enumerate().map(itemgetter(1)).prefetch(2).group_by_key()
    assert list(pipe) == list(first(folder))


def numbered(sample: dict[str, Any]) -> list[tuple[str, int]]:
    return [(sample["__key__"], number) for number in range(2)]


def test_flatmap_gives_several_items_when_samples_are_taken_apart(folder: Path) -> None:
    """Each sample is asked once."""
    assert list(first(folder).flatmap(numbered)) == [(key, number) for key in KEYS for number in range(2)]


def test_set_length_tells_the_length_when_the_user_knows_it(folder: Path) -> None:
    """The samples are what they were."""
    pipe = first(folder).set_length(len(KEYS))
    assert len(pipe) == len(KEYS)
    assert keys(pipe) == KEYS


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_prefetch_loses_nothing_when_it_stands_anywhere(folder: Path, place: int) -> None:
    """Before and behind loading, grouping and shuffling, over two epochs."""
    pipe: IterDataPipe[Any] = urls(folder)
    stages = ["load_wds_shards", "group_by_key", "wds_shuffle"]
    for number in range(4):
        pipe = pipe.prefetch(3) if number == place else pipe
        pipe = getattr(pipe, stages[number])() if number < 3 else pipe
    assert sorted(keys(pipe)) == sorted(keys(pipe)) == sorted(KEYS)


def test_prefetch_gives_all_samples_when_the_loop_was_left_early(folder: Path) -> None:
    """What the thread had read ahead is no part of the next epoch."""
    pipe = first(folder).prefetch(2)
    for _ in pipe:
        break
    assert keys(pipe) == KEYS


def test_fork_gives_all_samples_to_each_branch(folder: Path) -> None:
    """Two branches of one reading, joined again."""
    one, two = first(folder).fork(2, buffer_size=100)
    pairs = one.wds_to_tuple("__key__").zip(two.wds_decode().wds_to_tuple("cls"))
    assert [(key, label) for (key,), (label,) in pairs] == [(key, int(key[-5:]) % 10) for key in KEYS]


def is_odd(sample: dict[str, Any]) -> int:
    return int(sample["__key__"][-1]) % 2


def test_demux_gives_each_sample_to_one_branch(folder: Path) -> None:
    """Together they are all samples."""
    even, odd = first(folder).demux(2, is_odd, buffer_size=100)
    found = [keys(even), keys(odd)]
    assert found == [[key for key in KEYS if int(key[-1]) % 2 == rest] for rest in (0, 1)]


def test_cycle_repeats_all_samples_when_asked(folder: Path) -> None:
    """Shards read again give whole samples again, whether shards or samples are repeated."""
    assert keys(first(folder).cycle(2)) == KEYS * 2
    assert keys(urls(folder).cycle(2).load_wds_shards().group_by_key()) == KEYS * 2


def test_repeat_keeps_readings_apart_when_each_shard_comes_twice_in_a_row(folder: Path) -> None:
    """A shard read twice in a row gives its samples twice, none merged, fused or not."""
    paths = urls(folder).repeat(2)
    expected = [key for number, size in enumerate(SIZES) for key in KEYS[sum(SIZES[:number]) :][:size] * 2]
    assert keys(paths.load_wds_shards().group_by_key()) == expected
    assert keys(paths.load_wds_shards().filter(is_no_json).group_by_key()) == expected


def test_repeat_keeps_readings_apart_when_a_shard_holds_one_sample(tmp_path: Path) -> None:
    """The last and the next first sample have one key then: they are two samples still."""
    (path,) = write_text_shards(tmp_path, (1,))
    pipe = IterableWrapper([path]).repeat(3).load_wds_shards()
    assert keys(pipe.group_by_key()) == keys(pipe.filter(is_no_json).group_by_key()) == ["s0-00000"] * 3


def test_in_memory_cache_gives_the_same_samples_when_iterated_again(folder: Path, tmp_path: Path) -> None:
    """The second epoch comes from memory: the shard may be gone."""
    path = tmp_path / "x.tar"
    write_tar(path, text_samples("x", 3))
    pipe = IterableWrapper([str(path)]).load_wds_shards().group_by_key().in_memory_cache(size=1)
    before = list(pipe)
    path.unlink()
    assert list(pipe) == before
    assert len(before) == 3


def test_enumerate_counts_all_samples(folder: Path) -> None:
    """Numbers from 0, each sample once."""
    assert [(number, key_of(sample)) for number, sample in first(folder).enumerate()] == list(enumerate(KEYS))


def test_add_index_puts_a_number_into_each_sample(folder: Path) -> None:
    """A sample is a plain dict, as this native pipe wants it."""
    assert [sample["index"] for sample in first(folder).add_index()] == list(range(len(KEYS)))


def test_header_takes_the_first_samples(folder: Path) -> None:
    """The rest is not read, and the next epoch is the same."""
    pipe = first(folder).header(3)
    assert keys(pipe) == keys(pipe) == KEYS[:3]


def test_slice_chooses_places_when_samples_are_tuples(folder: Path) -> None:
    """Our tuples are the native pipes' rows; `.drop` and `.flatten` work on them as well."""
    rows = first(folder).wds_to_tuple("__key__", "txt", "cls")
    assert [row[0] for row in rows.slice(0, 1)] == KEYS
    assert [row[0] for row in rows.drop([1, 2])] == KEYS


def test_native_map_changes_columns_when_samples_are_dicts_or_tuples(folder: Path) -> None:
    """`input_col` is a field or a place."""
    assert [sample["cls"] for sample in first(folder).map(int, input_col="cls")] == [int(key[-5:]) % 10 for key in KEYS]
    rows = first(folder).wds_to_tuple("__key__", "cls").map(int, input_col=1)
    assert [label for _, label in rows] == [int(key[-5:]) % 10 for key in KEYS]


def test_bucketbatch_batches_all_samples(folder: Path) -> None:
    """Native batching of our tuples, then our collating."""
    pipe = first(folder).wds_to_tuple("__key__").bucketbatch(batch_size=3, drop_last=False, use_in_batch_shuffle=False)
    assert sorted(key for (names,) in pipe.collate(wds_collate) for key in names) == sorted(KEYS)


def test_batches_hold_all_samples_when_the_native_unbatch_takes_them_apart(folder: Path) -> None:
    """`.batch(n).unbatch()` without collating in between."""
    assert keys(first(folder).batch(4).unbatch()) == KEYS


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
    assert keys(pipe) == KEYS
    assert source.open == 0
    for _ in pipe:
        break
    del pipe
    assert source.open == 0
