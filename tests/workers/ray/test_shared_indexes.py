"""Indexes of data sets travel to actors once, apart from what refers to them."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits.shards import write_text_shards
from torchdata_wds import DatasetIndex, index_shard
from torchdata_wds.workers.ray import shared_indexes
from torchdata_wds.workers.ray.shared_indexes import IndexReceiver, IndexSender


class Store:
    """Stands for the object store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.objects: list[Any] = []
        self.reads = 0
        monkeypatch.setattr(shared_indexes.ray, "get", self.get)

    def put(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def get(self, reference: int) -> Any:
        self.reads += 1
        return self.objects[reference]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


@pytest.fixture
def index(tmp_path: Path) -> DatasetIndex:
    urls = write_text_shards(tmp_path, [3, 4])
    return DatasetIndex.of([(url, index_shard(url)) for url in urls])


def rows(index: DatasetIndex) -> list[Any]:
    return [[array.tolist() for array in index.rows(0, 0, 3)], index.shards[1], index.digest]


def test_index_of_a_file_is_read_from_the_file_when_it_is_there(
    index: DatasetIndex, store: Store, tmp_path: Path
) -> None:
    """Also parts of it, with their own URLs."""
    index.save(tmp_path / "x.index")
    packed = DatasetIndex.load(tmp_path / "x.index")
    part = packed.select([packed.shards[1].url])
    sender, receiver = IndexSender(store.put), IndexReceiver()
    found, found_part = receiver.unpack(sender.pack((packed, part)))
    assert rows(found) == rows(index)
    assert found_part == part
    assert (len(store.objects), store.reads) == (1, 0)


@pytest.mark.parametrize("change", ["removed", "replaced", "damaged"])
def test_index_comes_from_the_store_when_the_machine_has_another_file(
    change: str, index: DatasetIndex, store: Store, tmp_path: Path
) -> None:
    """It is sent once, and opened once by each actor."""
    path = tmp_path / "x.index"
    index.save(path)
    packed = DatasetIndex.load(path)
    sender, receiver = IndexSender(store.put), IndexReceiver()
    sent = sender.pack({"index": packed})
    if change == "replaced":
        index.select([index.shards[0].url]).save(path)
    else:
        path.unlink()
    if change == "damaged":
        path.write_bytes(b"x" * 500)
    assert rows(receiver.unpack(sent)["index"]) == rows(index)
    assert rows(receiver.unpack(sender.pack([packed, packed]))[1]) == rows(index)
    assert (len(store.objects), store.reads) == (1, 1)


def test_index_in_memory_comes_from_the_store(index: DatasetIndex, store: Store) -> None:
    """What refers to it is small."""
    sent = IndexSender(store.put).pack((index, lambda: 5))
    assert len(sent.data) < 2000
    found, function = IndexReceiver().unpack(sent)
    assert rows(found) == rows(index)
    assert function() == 5


def test_indexes_are_dropped_when_they_are_not_used_any_more(index: DatasetIndex, store: Store) -> None:
    """By both sides: the list of shards may change in every epoch."""
    sender, receiver = IndexSender(store.put), IndexReceiver()
    parts = [DatasetIndex.of([(shard.url, index_shard(shard.url))]) for shard in index.shards]
    for _ in range(2):
        for part in parts:
            sender.drop_unused()
            for _ in range(2):
                assert receiver.unpack(sender.pack(part)) == part
    assert (len(sender._known), len(receiver._open), len(receiver._before)) == (2, 1, 1)
    assert (len(store.objects), store.reads) == (4, 4)
