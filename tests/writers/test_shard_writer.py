"""ShardWriter: numbered shards, none too large, none half written."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kits.processes import open_files
from torchdata_wds import EncodingError, ShardIndex, ShardInfo, ShardOpenError, ShardWriter, WebDataset
from torchdata_wds.format.shards import ShardNames


def samples(count: int, first: int = 0) -> list[dict[str, Any]]:
    """Samples that take 1,536 bytes each."""
    return [{"__key__": f"{number:06d}", "bin": b"%d" % number * 9} for number in range(first, first + count)]


def write(pattern: str | Path, count: int = 10, *, first: int = 0, **options: Any) -> list[ShardInfo]:
    """Writes so many samples; returns the finished shards."""
    with ShardWriter(str(pattern), **options) as writer:
        for sample in samples(count, first):
            writer.write(sample)
    return writer.shards


def keys(*paths: Path | str) -> list[str]:
    """The keys in some shards."""
    return [sample["__key__"] for sample in WebDataset([str(path) for path in paths], shardshuffle=False)]


def names(folder: Path) -> list[str]:
    """The files in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def test_writer_begins_a_shard_when_the_count_is_reached(tmp_path: Path) -> None:
    """Every shard but the last is full; the infos tell count, size and digest."""
    shards = write(tmp_path / "x-%06d.tar", max_count=4)
    assert names(tmp_path) == ["x-000000.tar", "x-000001.tar", "x-000002.tar"]
    assert [shard.count for shard in shards] == [4, 4, 2]
    assert keys(*(shard.path for shard in shards)) == [f"{number:06d}" for number in range(10)]
    for shard in shards:
        data = Path(shard.path).read_bytes()
        assert (shard.bytes, shard.sha256) == (len(data), hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("limit", [10_240, 20_479, 20_480, 30_720])
def test_writer_begins_a_shard_before_the_sample_that_would_pass_the_limit(limit: int, tmp_path: Path) -> None:
    """No shard is larger than max_bytes, header, padding and end marker included, and none wastes a place."""
    shards = write(tmp_path / "x-%d.tar", 60, max_bytes=limit)
    assert all(shard.bytes <= limit for shard in shards)
    record = limit // 10_240 * 10_240
    assert {shard.count for shard in shards[:-1]} == {(record - 1024) // 1024}
    assert sum(shard.count for shard in shards) == 60


def test_limit_counts_bytes_before_compression(tmp_path: Path) -> None:
    """Compressed shards hold as many samples as others."""
    plain = write(tmp_path / "x-%d.tar", 60, max_bytes=20_480)
    packed = write(tmp_path / "x-%d.tar.gz", 60, max_bytes=20_480)
    assert [shard.count for shard in plain] == [shard.count for shard in packed]
    assert packed[0].bytes < plain[0].bytes / 5


def test_sample_larger_than_the_limit_gets_a_shard_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, and a warning names it."""
    with caplog.at_level(logging.WARNING), ShardWriter(f"{tmp_path}/x-%d.tar", max_bytes=20_000) as writer:
        for key, size in (("a", 10), ("b", 50_000), ("c", 10)):
            writer.write({"__key__": key, "bin": bytes(size)})
    assert [keys(shard.path) for shard in writer.shards] == [["a"], ["b"], ["c"]]
    (record,) = caplog.records
    assert "'b' alone makes a shard of" in record.getMessage()


def test_nothing_is_created_before_the_first_sample(tmp_path: Path) -> None:
    """An empty run leaves nothing behind."""
    assert write(tmp_path / "x-%d.tar", 0) == []
    assert names(tmp_path) == []


def test_post_is_called_with_each_finished_shard(tmp_path: Path) -> None:
    """After the final name is there, in order; what it raises comes out."""
    seen = []

    def post(shard: ShardInfo) -> None:
        assert keys(shard.path)
        seen.append(shard)

    assert write(tmp_path / "x-%d.tar", max_count=3, post=post) == seen

    def fail(shard: ShardInfo) -> None:
        raise RuntimeError(shard.path)

    with pytest.raises(RuntimeError, match=r"y-0\.tar"):
        write(tmp_path / "y-%d.tar", max_count=3, post=fail)
    assert [name for name in names(tmp_path) if name.startswith("y")] == ["y-0.tar"]


def test_exception_leaves_finished_shards_and_one_partial(tmp_path: Path) -> None:
    """No hook is called for the open one, and no file stays open."""
    before, posted = open_files(), []
    writer = ShardWriter(f"{tmp_path}/x-%d.tar", max_count=4, post=posted.append)
    with pytest.raises(RuntimeError), writer:
        for sample in samples(6):
            writer.write(sample)
        raise RuntimeError
    assert names(tmp_path) == ["x-0.tar", "x-1.tar.partial"]
    assert [shard.path for shard in posted] == [f"{tmp_path}/x-0.tar"]
    assert open_files() <= before
    with pytest.raises(ValueError, match="closed"):
        writer.write(samples(1)[0])


def test_finished_shards_are_not_overwritten_unless_asked(tmp_path: Path) -> None:
    """A second run is refused at its first sample, and loses no sample if the caller goes on."""
    write(tmp_path / "x-%d.tar", max_count=4)
    content = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with ShardWriter(f"{tmp_path}/x-%d.tar") as writer:
        for _ in range(2):
            with pytest.raises(ShardOpenError, match=r"x-0\.tar.*already exists.*overwrite=True.*'next'"):
                writer.write(samples(1)[0])
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == content
    write(tmp_path / "x-%d.tar", 5, first=90, overwrite=True)
    assert keys(tmp_path / "x-0.tar") == [f"{number:06d}" for number in range(90, 95)]


def test_next_continues_behind_the_highest_number(tmp_path: Path) -> None:
    """Gaps stay gaps; other files, unfinished shards and other patterns do not count."""
    pattern = tmp_path / "x-%03d.tar"
    assert [Path(shard.path).name for shard in write(pattern, 2, start_shard="next")] == ["x-000.tar"]
    for name in ("x-007.tar", "x-009.tar.partial", "x-010.tar.index", "y-020.tar", "x-30.tar.gz", "x-0001a.tar"):
        (tmp_path / name).touch()
    shards = write(pattern, 5, max_count=2, start_shard="next")
    assert [Path(shard.path).name for shard in shards] == ["x-008.tar", "x-009.tar", "x-010.tar"]
    (tmp_path / "x-99999.tar").touch()
    assert [Path(shard.path).name for shard in write(pattern, 1, start_shard="next")] == ["x-100000.tar"]


def test_next_works_in_stores_and_says_where_it_cannot(tmp_path: Path) -> None:
    """A store lists its shards; a command has none."""
    pattern = "memory://bucket-of-next/x-{shard:03d}.tar"
    assert [shard.path[-7:] for shard in write(pattern, 4, max_count=2)] == ["000.tar", "001.tar"]
    assert [shard.path[-7:] for shard in write(pattern, 1, start_shard="next")] == ["002.tar"]
    for bad in (f"pipe:cat > {tmp_path}/%d.tar", f"{tmp_path}/%d/x.tar"):
        with pytest.raises(ValueError, match="'next'"):
            write(bad, 1, start_shard="next")


def test_start_shard_is_the_first_number(tmp_path: Path) -> None:
    """As in webdataset."""
    shards = write(tmp_path / "x-%d.tar", 3, max_count=2, start_shard=7)
    assert [Path(shard.path).name for shard in shards] == ["x-7.tar", "x-8.tar"]


def test_opener_opens_the_files(tmp_path: Path) -> None:
    """A binary file for each name, closed when its shard is whole."""
    opened: list[Any] = []

    def opener(name: str) -> Any:
        opened.append((tmp_path / name).open("wb"))
        return opened[-1]

    shards = write("x-%d.tar.gz", max_count=6, opener=opener)
    assert [shard.path for shard in shards] == ["x-0.tar.gz", "x-1.tar.gz"]
    assert all(file.closed for file in opened)
    assert len(keys(tmp_path / "x-0.tar.gz")) == 6
    with pytest.raises(ValueError, match="index"):
        ShardWriter("x-%d.tar", opener=opener, index=True)
    writer = ShardWriter("y-%d.tar", opener=opener)
    with pytest.raises(RuntimeError), writer:
        writer.write(samples(1)[0])
        raise RuntimeError
    assert opened[-1].closed


def test_index_lies_beside_each_shard(tmp_path: Path) -> None:
    """Its header knows the digest; overwriting replaces it."""
    for count in (5, 4):
        for shard in write(tmp_path / "x-%d.tar", count, max_count=3, index=True, overwrite=True):
            index = ShardIndex.beside(shard.path)
            assert (len(index), index.header.sha256, index.header.bytes) == (shard.count, shard.sha256, shard.bytes)
    assert names(tmp_path) == [".wds-index", "x-0.tar", "x-1.tar"]
    assert names(tmp_path / ".wds-index") == ["x-0.tar.index", "x-1.tar.index"]


def test_refused_sample_opens_no_shard(tmp_path: Path) -> None:
    """A sample that cannot be written neither begins nor ends a shard."""
    with ShardWriter(f"{tmp_path}/x-%d.tar", max_count=2) as writer:
        for sample in samples(2):
            writer.write(sample)
        with pytest.raises(EncodingError):
            writer.write({"__key__": "a", "cls": "no number"})
        assert names(tmp_path) == ["x-0.tar.partial"]
    assert names(tmp_path) == ["x-0.tar"]


def test_place_of_the_process_fills_the_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """{rank} and {worker} are those that a launcher sets."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (shard,) = write(f"{tmp_path}/r{{rank}}-w{{worker:02d}}-{{shard:06d}}.tar", 1)
    assert Path(shard.path).name == "r3-w03-000000.tar"
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="RANK"):
        ShardWriter("x-%d.tar")


def test_shard_names_fill_both_kinds_of_places() -> None:
    """As % and as format have it."""
    for pattern, number, name in [
        ("x-%06d.tar", 7, "x-000007.tar"),
        ("x-%d.tar", 7, "x-7.tar"),
        ("x-%3d.tar", 7, "x-  7.tar"),
        ("{shard}.tar", 7, "7.tar"),
        ("{shard:06d}.tar", 1234567, "1234567.tar"),
        ("{shard:04}.tar", 7, "0007.tar"),
        ("100%%-%d.tar", 7, "100%-7.tar"),
        ("100%%-{shard}.tar", 7, "100%%-7.tar"),
        ("pipe:awk '{print}' > {shard:02d}.tar", 7, "pipe:awk '{print}' > 07.tar"),
    ]:
        assert ShardNames(pattern).name(number) == name


def test_shard_names_refuse_patterns_without_one_place() -> None:
    """The message lists the places that there are."""
    for pattern, message in [
        ("x.tar", "0 places"),
        ("x-%d-{shard}.tar", "2 places"),
        ("x-{number}-%d.tar", r"unknown place \{number\}"),
        ("x-{0..3}-%d.tar", r"unknown place \{0\.\.3\}"),
        ("x{}-%d.tar", r"unknown place \{\}"),
        ("x-{epoch:03d}-%d.tar", "unknown place"),
        ("{rank}.tar", "0 places"),
    ]:
        with pytest.raises(ValueError, match=f"{message}.*%06d or"):
            ShardWriter(pattern)


def test_writer_refuses_wrong_options_before_any_work() -> None:
    """In the constructor, by name."""
    for options, error in [
        ({"max_count": 0}, ValueError),
        ({"max_count": "9"}, TypeError),
        ({"max_bytes": 0}, ValueError),
        ({"max_bytes": float("nan")}, ValueError),
        ({"start_shard": -1}, ValueError),
        ({"start_shard": "last"}, ValueError),
        ({"max_count": 2.5}, TypeError),
        ({"lowercase": "no"}, TypeError),
        ({"index": "yes"}, TypeError),
        ({"storage_options": 5}, TypeError),
        ({"verbose": 1}, TypeError),
        ({"post": 1}, TypeError),
        ({"opener": "open"}, TypeError),
        ({"overwrite": 1}, TypeError),
        ({"compress": "zip"}, ValueError),
        ({"maxcount": 7}, TypeError),
        ({"encoder": 7}, TypeError),
        ({"mode": -1}, ValueError),
    ]:
        with pytest.raises(error, match=next(iter(options))):
            ShardWriter("x-%d.tar", **options)
        with pytest.raises(TypeError, match="pattern"):
            ShardWriter(7)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'maxcount': did you mean 'max_count'"):
            ShardWriter("x-%d.tar", maxcount=7)  # type: ignore[call-arg]
        for options in ({"start_shard": "next"}, {"index": True}):
            with pytest.raises(ValueError, match=r"folder|no place"):
                ShardWriter("pipe:cat > %d.tar", **options)


def test_pattern_and_numbers_may_be_of_related_types(tmp_path: Path) -> None:
    """A Path, and numbers of numpy."""
    with ShardWriter(tmp_path / "x-%d.tar", max_count=np.int64(2), start_shard=np.int32(3)) as writer:
        for sample in samples(3):
            writer.write(sample)
    assert [Path(shard.path).name for shard in writer.shards] == ["x-3.tar", "x-4.tar"]


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("place", ["memory://faster", "local"])
def test_slower_writer_leaves_the_faster_ones_shard_and_index_alone(index: bool, place: str, tmp_path: Path) -> None:
    """Who comes second is refused, and touches nothing."""
    folder = str(tmp_path) if place == "local" else f"{place}-{index}"
    (tmp_path / "other").mkdir()
    slow = ShardWriter(f"{folder}/x-%d.tar", index=index)
    slow.write({"__key__": "slow", "txt": "x"})
    if place == "local":
        with ShardWriter(f"{tmp_path}/other/x-%d.tar", index=True) as fast:
            fast.write({"__key__": "fast", "txt": "x"})
        for path in (tmp_path / "other").iterdir():
            path.rename(tmp_path / path.name)
    else:
        with ShardWriter(f"{folder}/x-%d.tar", index=True) as fast:
            fast.write({"__key__": "fast", "txt": "x"})
    for _ in range(2):
        with pytest.raises(ShardOpenError, match=r"meanwhile|not whole"):
            slow.close()
    assert slow.shards == []
    assert keys(f"{folder}/x-0.tar") == [row.key for row in ShardIndex.beside(f"{folder}/x-0.tar")] == ["fast"]


def test_failed_shard_is_told_again_to_whoever_goes_on(tmp_path: Path) -> None:
    """After a shard could not be finished neither writing nor closing works as if nothing had been."""
    writer = ShardWriter(f"{tmp_path}/x-%d.tar", max_count=2)
    for sample in samples(2):
        writer.write(sample)
    (tmp_path / "x-0.tar").touch()
    with pytest.raises(ShardOpenError, match="meanwhile"):
        writer.write(samples(1, 5)[0])
    with pytest.raises(ShardOpenError, match="not whole"):
        writer.write(samples(1, 5)[0])
    with pytest.raises(ShardOpenError, match="not whole"):
        writer.close()


def test_opener_must_return_a_binary_file_and_loses_none(tmp_path: Path) -> None:
    """Names are refused; a file is closed where its shard cannot be begun."""
    for wrong in (str(tmp_path / "y.tar"), tmp_path / "y.tar"):
        writer = ShardWriter("x-%d.tar", opener=lambda _, wrong=wrong: wrong)
        with pytest.raises(TypeError, match="opener must return"):
            writer.write(samples(1)[0])
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"), ShardWriter("x-%d.tar", opener=lambda _: open("/dev/full", "wb")):  # noqa: PTH123
        raise error


def test_storage_options_are_out_of_sight() -> None:
    """What may be secret does not show."""
    writer = ShardWriter("x-%d.tar", storage_options={"s3": {"secret": "hidden"}})
    assert "hidden" not in str(vars(writer))
