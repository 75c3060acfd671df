"""group_by_key(fields=) and load_wds_shards(select=): what is kept, and warnings about names that nothing has."""

import logging
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import sample_members, write_tar
from torchdata_wds.pipes.samples import group_by_key as group


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """Ten samples with a picture and a text, one of them without text."""
    members = [sample_members(f"{number:02d}", jpg=b"j", txt=b"t") for number in range(9)]
    return write_tar(
        tmp_path / "x.tar", [part for sample in [*members, sample_members("9", jpg=b"j")] for part in sample]
    )


def grouped(shard: str, fields: Any, way: str, **options: Any) -> Any:
    """The samples of a shard, grouped right after the loader or with a stage between."""
    members = IterableWrapper([shard]).load_wds_shards(interleave=2 if way == "interleaved" else 1)
    return (members.filter(bool) if way == "apart" else members).group_by_key(fields=fields, **options)


@pytest.mark.parametrize("way", ["together", "apart", "interleaved"])
@pytest.mark.parametrize(
    ("fields", "names", "left"),
    [("jpgg", "'jpgg'", 0), (["jpg", "cls", "json"], "'cls', 'json'", 10), ("txt;TXTT", "'txtt'", 9)],
)
def test_group_by_key_warns_when_no_sample_has_a_field_to_keep(
    caplog: pytest.LogCaptureFixture, shard: str, way: str, fields: Any, names: str, left: int
) -> None:
    """Once, at the end of the stream; samples with none of the fields are counted."""
    pipe = grouped(shard, fields, way)
    for _ in range(2):
        assert len(list(pipe)) == left
    (record,) = caplog.records
    assert f"names {names}, which none of 10 samples has; {10 - left} of them" in record.getMessage()
    assert pipe.skipped == ({"sample without the chosen fields": 2 * (10 - left)} if left < 10 else {})


@pytest.mark.parametrize("way", ["together", "apart"])
@pytest.mark.parametrize("fields", [None, "txt", ".JPG txt", ["jpg"]])
def test_group_by_key_is_silent_when_some_sample_has_each_field(
    caplog: pytest.LogCaptureFixture, shard: str, way: str, fields: Any
) -> None:
    """A filter may leave samples out: fields are not the same in all of them."""
    assert len(list(grouped(shard, fields, way))) == (9 if fields == "txt" else 10)
    assert not caplog.records


def test_group_by_key_is_silent_when_a_stream_is_empty_or_left_early(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, shard: str
) -> None:
    """A worker without shards, and a look at the first sample."""
    assert list(grouped(write_tar(tmp_path / "empty.tar", []), "jpgg", "together")) == []
    assert len(list(islice(grouped(shard, "jpg cls", "together"), 3))) == 3
    assert not caplog.records


def test_group_by_key_warns_after_many_samples_when_a_stream_has_no_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    """Shards that are drawn again and again never come to an end."""
    monkeypatch.setattr(group, "ENOUGH_SAMPLES", 25)
    pipe = IterableWrapper([shard]).resample_shards().load_wds_shards().group_by_key(fields="jpg cls")
    with caplog.at_level(logging.WARNING):
        assert len(list(islice(pipe, 30))) == 30
    (record,) = caplog.records
    assert "names 'cls', which none of 25 samples has" in record.getMessage()


@pytest.mark.parametrize("way", ["together", "apart"])
@pytest.mark.parametrize("select", ["jpg", "*.jpgg", ["*.JPG", "*.cls"], str.isdigit])
def test_load_wds_shards_warns_when_it_selects_nothing_of_a_shard(
    caplog: pytest.LogCaptureFixture, shard: str, way: str, select: Any
) -> None:
    """The epoch is empty; the warning shows a name that the globs might have meant."""
    members = IterableWrapper([shard] * 2).load_wds_shards(select=select)
    assert list((members.filter(bool) if way == "apart" else members).group_by_key()) == []
    (record,) = caplog.records
    assert "takes none of the members of shard" in record.getMessage()
    assert "'00.jpg'" in record.getMessage()


@pytest.mark.parametrize("select", ["*.txt", "*/x *.jpg", "00.*"])
def test_load_wds_shards_is_silent_when_it_selects_something(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, shard: str, select: str
) -> None:
    """Some members of the shard; an empty shard has nothing to select."""
    empty = write_tar(tmp_path / "empty.tar", [])
    assert list(IterableWrapper([shard, empty]).load_wds_shards(select=select).group_by_key())
    assert not caplog.records
