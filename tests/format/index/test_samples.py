"""Samples that are not where their index says: the error says so, and only they are lost."""

import os
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import keys_of, sample_members, write_tar
from torchdata_wds import ChangedShardError, IndexedShards, index_shard, warn_and_continue


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (slice(0, 100), "no tar header is there"),
        (slice(124, 136), "no tar header is there"),
        (slice(1024, 1100), "has a damaged header"),
    ],
    ids=["name", "size", "second member"],
)
def test_damaged_header_loses_one_sample(tmp_path: Path, part: slice, why: str) -> None:
    """Its neighbours are read, though one read gets them all; the first bytes of the shard are not blamed."""
    members = [member for key in range(9) for member in sample_members(f"k{key}", cls=b"1", txt=b"text")]
    path = Path(write_tar(tmp_path / "a.tar", members))
    index, status = {str(path): index_shard(path, to=False)}, path.stat()
    data = bytearray(path.read_bytes())
    begin = 4 * 4 * 512
    data[begin + part.start : begin + part.stop] = b"\xff" * (part.stop - part.start)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with IndexedShards(str(path), index=index) as shards:
        with pytest.raises(ChangedShardError, match=rf"sample 4 of shard .*a\.tar is not at bytes 8,192 to .*{why}"):
            shards[4]
        assert [sample["__key__"] for sample in shards[[3, 5]]] == ["k3", "k5"]
    pipe = IterableWrapper([str(path)]).load_in_order(index=index, handler=warn_and_continue, shuffle=False)
    assert keys_of(pipe) == [f"k{key}" for key in range(9) if key != 4]
