"""wds_encode and save_wds_shards: the end of a graph that writes."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from tests.kits.torchdata import DataLoader2, MultiProcessingReadingService, WorkersReadingService
from torchdata_wds import (
    EncodingError,
    SampleError,
    ShardInfo,
    ShardOpenError,
    WebDataset,
    ignore_and_continue,
    ignore_and_stop,
)

SIZES = (5, 3, 7, 2, 4, 6)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six text shards."""
    folder = tmp_path_factory.mktemp("source")
    write_text_shards(folder, SIZES)
    return f"{folder}/shard-{{000000..000005}}.tar"


def read(pattern: str) -> list[dict[str, Any]]:
    """The samples of some shards without their URLs, by key."""
    samples = [dict(sample) for sample in WebDataset(pattern, shardshuffle=False)]
    for sample in samples:
        del sample["__url__"]
    return sorted(samples, key=lambda sample: str(sample["__key__"]))


def relabel(sample: dict[str, Any]) -> dict[str, Any]:
    """A transformation between reading and writing."""
    return {**sample, "cls": sample["cls"] + 100}


def test_save_writes_what_flows_in(source: str, tmp_path: Path) -> None:
    """Read, transform, write: every sample is there once, and every shard is told."""
    pipe = (
        IterableWrapper([source]).list_shards().load_wds_shards().group_by_key()
        .wds_decode().map(relabel).save_wds_shards(f"{tmp_path}/y-%03d.tar", max_count=10)
    )  # fmt: skip
    assert [shard.count for shard in list(pipe)] == [10, 10, 7]
    before, after = read(source), read(f"{tmp_path}/y-*.tar")
    assert [sample["__key__"] for sample in after] == [sample["__key__"] for sample in before]
    assert [int(sample["cls"]) for sample in after] == [int(sample["cls"]) + 100 for sample in before]
    with pytest.raises(ShardOpenError, match="already exists"):
        list(pipe)


def test_save_tells_each_shard_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    """The first info comes before the second shard is written."""
    samples = [{"__key__": f"{number}", "cls": number} for number in range(7)]
    iterator = iter(IterableWrapper(samples).save_wds_shards(f"{tmp_path}/x-%d.tar", max_count=2))
    assert next(iterator).count == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x-0.tar", "x-1.tar.partial"]
    assert sum(shard.count for shard in iterator) == 5


def test_save_leaves_the_open_shard_partial_when_left_early(tmp_path: Path) -> None:
    """A break is no end of the data."""
    samples = [{"__key__": f"{number}", "cls": number} for number in range(7)]
    for _ in IterableWrapper(samples).save_wds_shards(f"{tmp_path}/x-%d.tar", max_count=2):
        break
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x-0.tar", "x-1.tar.partial"]


BAD = [{"__key__": "a", "cls": 1}, {"__key__": "b", "cls": "x"}, {"__key__": "a", "cls": 2}, {"__key__": "c", "cls": 3}]


def test_save_asks_the_handler_about_samples(tmp_path: Path) -> None:
    """A sample that cannot be written, or whose key was there, is skipped and counted, or ends the stream."""
    pipe = IterableWrapper([*BAD, "text"]).save_wds_shards(f"{tmp_path}/x-%d.tar", handler=ignore_and_continue)
    assert [shard.count for shard in pipe] == [2]
    assert pipe.skipped == {"EncodingError": 1, "ReappearingKeyError": 1, "TypeError": 1}
    stopped = IterableWrapper(BAD).save_wds_shards(f"{tmp_path}/y-%d.tar", handler=ignore_and_stop)
    assert [shard.count for shard in stopped] == [1]
    with pytest.raises(EncodingError, match="'cls' of sample 'b'"):
        list(IterableWrapper(BAD).save_wds_shards(f"{tmp_path}/z-%d.tar"))


def test_save_raises_what_the_destination_raises_whatever_the_handler_says(tmp_path: Path) -> None:
    """Skipping all samples because a folder is missing would be silent loss."""
    with pytest.raises(ShardOpenError, match="does not exist"):
        list(IterableWrapper(BAD).save_wds_shards(f"{tmp_path}/no/x-%d.tar", handler=ignore_and_continue))


def test_save_shows_no_secret(tmp_path: Path) -> None:
    """Storage options are masked in what torch prints of a pipe."""
    options = {"s3": {"key": "AKIA", "secret": "hidden"}}
    pipe = IterableWrapper(BAD).save_wds_shards(f"{tmp_path}/no/x-%d.tar", storage_options=options)
    with pytest.raises(ShardOpenError) as caught:
        list(pipe)
    assert "hidden" not in str(caught.value)
    assert "secret=***" in str(caught.value)


# ------------------------------------------------------------------------------------------------------- many workers
def saver(source: str, pattern: str) -> Any:
    """The graph that workers run."""
    return (
        IterableWrapper([source]).list_shards().shuffle().sharding_filter()
        .load_wds_shards().group_by_key().save_wds_shards(pattern, max_count=4)
    )  # fmt: skip


def check(source: str, folder: Path, shards: list[Any]) -> list[str]:
    """Every sample was written once, in the shards that were told; returns their names."""
    assert read(f"{folder}/*.tar") == read(source)
    assert sorted(shard.path for shard in shards) == sorted(map(str, folder.glob("*.tar")))
    assert sum(shard.count for shard in shards) == sum(SIZES)
    assert not list(folder.glob("*.partial"))
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("context", "pattern"),
    [
        ("fork", "x-%03d.tar"),
        ("fork", "w{worker}-{shard:03d}.tar"),
        pytest.param("spawn", "x-%03d.tar", marks=pytest.mark.slow),
        pytest.param("forkserver", "w{worker}-{shard:03d}.tar", marks=pytest.mark.slow),
    ],
)
def test_workers_write_shards_of_their_own(context: str, pattern: str, source: str, tmp_path: Path) -> None:
    """Numbers are shared out, or the pattern has the worker's own; nothing is lost or written twice."""
    service = WorkersReadingService(3, multiprocessing_context=context)
    with DataLoader2(saver(source, f"{tmp_path}/{pattern}"), reading_service=service) as loader:
        found = check(source, tmp_path, list(loader))
    if "worker" in pattern:
        assert {name.partition("-")[0] for name in found} == {"w0", "w1", "w2"}
        assert {"w0-000.tar", "w1-000.tar", "w2-000.tar"} <= set(found)
    else:
        assert {"x-000.tar", "x-001.tar", "x-002.tar"} <= set(found)


def test_workers_of_torchs_loader_write_shards_of_their_own(source: str, tmp_path: Path) -> None:
    """Under torch's DataLoader as well."""
    loader = DataLoader(saver(source, f"{tmp_path}/x-%03d.tar"), batch_size=None, num_workers=2)
    check(source, tmp_path, list(loader))


def test_stock_workers_write_shards_of_their_own(source: str, tmp_path: Path) -> None:
    """Under torchdata's own service too, where the sharding filter says who is who."""
    pipe = saver(source, f"{tmp_path}/x-%03d.tar").join_workers()
    with DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)) as loader:
        check(source, tmp_path, list(loader))


def test_stock_workers_are_refused_when_nothing_tells_them_apart(tmp_path: Path) -> None:
    """Without a sharding filter they would write the same shards."""
    samples = IterableWrapper([{"__key__": "a", "cls": 1}])
    pipe = samples.save_wds_shards(f"{tmp_path}/x-%03d.tar").join_workers()
    with (
        DataLoader2(pipe, reading_service=MultiProcessingReadingService(2)) as loader,
        pytest.raises(Exception, match="sharding_filter"),
    ):
        list(loader)


def test_workers_without_a_sharding_filter_write_apart(tmp_path: Path) -> None:
    """Each writes all that it reads, into shards of its own."""
    samples = IterableWrapper([{"__key__": "a", "cls": 1}])
    loader = DataLoader(samples.save_wds_shards(f"{tmp_path}/x-%03d.tar"), batch_size=None, num_workers=2)
    assert sorted(Path(shard.path).name for shard in loader) == ["x-000.tar", "x-001.tar"]


def test_next_keeps_workers_apart(source: str, tmp_path: Path) -> None:
    """A second run continues behind the first, whoever looks first."""
    for start in (0, "next"):
        pipe = (
            IterableWrapper([source]).list_shards().sharding_filter().load_wds_shards().group_by_key()
            .save_wds_shards(f"{tmp_path}/x-%03d.tar", max_count=4, start_shard=start)
        )  # fmt: skip
        with DataLoader2(pipe, reading_service=WorkersReadingService(2)) as loader:
            assert sum(shard.count for shard in loader) == sum(SIZES)
    assert len(read(f"{tmp_path}/*.tar")) == 2 * sum(SIZES)


# -------------------------------------------------------------------------------------------------------- wds_encode
def test_encode_is_the_other_direction_of_decode() -> None:
    """Metadata and order stay, bytes pass."""
    samples = [{"__key__": "a", "__url__": "x.tar", "txt": "ä", "cls": 3, "json": {"a": [1]}, "jpg": b"\xff\xd8"}]
    encoded = list(IterableWrapper(samples).wds_encode())
    assert list(encoded[0]) == list(samples[0])
    assert encoded[0]["json"] == b'{"a":[1]}'
    assert list(IterableWrapper(encoded).wds_decode()) == samples


def test_encode_asks_the_handler(tmp_path: Path) -> None:
    """A sample that cannot be encoded is skipped, or an error that names key and field."""
    pipe = IterableWrapper(BAD).wds_encode(handler=ignore_and_continue)
    assert [sample["__key__"] for sample in pipe] == ["a", "a", "c"]
    with pytest.raises(EncodingError, match="'cls' of sample 'b'"):
        list(IterableWrapper(BAD).wds_encode())
    with pytest.raises(TypeError, match="wds_encode got str"):
        list(IterableWrapper(["text"]).wds_encode())
    with pytest.raises(ValueError, match="rgb9"):
        IterableWrapper([]).wds_encode("rgb9")


def test_save_raises_what_post_raises_whatever_the_handler_says(tmp_path: Path) -> None:
    """It is no fault of the sample that comes next."""

    def post(shard: ShardInfo) -> None:
        raise SampleError(shard.path)

    samples = [{"__key__": f"{number}", "cls": number} for number in range(6)]
    pipe = IterableWrapper(samples).save_wds_shards(
        f"{tmp_path}/x-%d.tar", max_count=2, post=post, handler=ignore_and_continue
    )
    with pytest.raises(SampleError, match=r"x-0\.tar"):
        list(pipe)


@pytest.mark.parametrize("pattern", ["x-%d.tar", "w{worker}-%d.tar", "r{rank}-%d.tar"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_launcher_write_shards_of_their_own(
    pattern: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the filter does not divide the work among ranks, the environment still tells them apart."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        samples = IterableWrapper([{"__key__": f"{rank}-{number}", "cls": number} for number in range(6)])
        pipe = samples.sharding_filter().save_wds_shards(f"{tmp_path}/{pattern}", max_count=2)
        list(DataLoader(pipe, batch_size=None, num_workers=workers))
    assert len(read(f"{tmp_path}/*.tar")) == 12
