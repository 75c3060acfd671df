"""Where indexes lie: in a hidden folder beside the shards, or at the old place."""

import os
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.servers import serve_folder
from tests.kits.shards import text_samples, write_tar
from torchdata_wds import ShardIndex, ShardOpenError, ShardWriter, index_shard
from torchdata_wds.format.index import read_index_header
from torchdata_wds.format.index.sidecars import index_url, local_index, old_index_url
from torchdata_wds.storage import list_urls, remove_target


@pytest.mark.parametrize(
    ("shard", "hidden", "old"),
    [
        ("x.tar", ".wds-index/x.tar.index", "x.tar.index"),
        ("~/x.tar", "~/.wds-index/x.tar.index", "~/x.tar.index"),
        (Path("a?b/x.tar"), "a?b/.wds-index/x.tar.index", "a?b/x.tar.index"),
        ("file:x.tar", "file:.wds-index/x.tar.index", "file:x.tar.index"),
        ("file:///a%20b/x.tar", "file:///a%20b/.wds-index/x.tar.index", "file:///a%20b/x.tar.index"),
        ("https://h/x.tar?a=1/2", "https://h/.wds-index/x.tar.index?a=1/2", "https://h/x.tar.index?a=1/2"),
        ("s3://b/x.tar", "s3://b/.wds-index/x.tar.index", "s3://b/x.tar.index"),
        (
            "s3://b/d/x.tar?versionId=3",
            "s3://b/d/.wds-index/x.tar.index?versionId=3",
            "s3://b/d/x.tar.index?versionId=3",
        ),
        ("simplecache::s3://b/x.tar", "simplecache::s3://b/.wds-index/x.tar.index", "simplecache::s3://b/x.tar.index"),
        ("zip://x.tar::s3://b/a.zip", "zip://.wds-index/x.tar.index::s3://b/a.zip", "zip://x.tar.index::s3://b/a.zip"),
    ],
)
def test_index_url_is_in_a_hidden_folder_and_keeps_queries(shard: str | Path, hidden: str, old: str) -> None:
    """A signed URL stays one, and paths may hold question marks."""
    assert (index_url(shard), old_index_url(shard)) == (hidden, old)


@pytest.mark.parametrize("url", ["-", "pipe:cat x.tar"])
def test_index_url_raises_for_a_stream(url: str) -> None:
    """Nothing lies beside it."""
    with pytest.raises(ValueError, match="no place"):
        index_url(url)
    with pytest.raises(ValueError, match="no place"):
        ShardIndex.beside(url)


def test_index_is_found_in_the_hidden_folder_first_then_at_its_old_place(tmp_path: Path) -> None:
    """Locally and on a server, whole or its first line only."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    index_shard(shard)
    index_shard(shard, to=old_index_url(shard), keys="last_dot")
    with serve_folder(tmp_path) as server:
        urls = shard, f"file://{shard}", f"{server}/x.tar"
        for keys in ("first_dot", "last_dot"):
            for url in urls:
                assert ShardIndex.beside(url).header.keys == read_index_header(url).keys == keys
            found = local_index(shard)
            assert found is not None
            Path(found).unlink()
        for url in urls:
            with pytest.raises(ShardOpenError, match=r"\.wds-index/x\.tar\.index"):
                ShardIndex.beside(url)
    assert local_index(shard) is None


def test_index_folder_is_made_only_where_it_is_the_hidden_one(tmp_path: Path) -> None:
    """Any other folder that is missing is a mistake; and a file of its name is reported."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    with pytest.raises(ShardOpenError, match="does not exist"):
        index_shard(shard, to=tmp_path / "no" / "x.tar.index")
    with pytest.raises(ShardOpenError, match="folder cannot be made: No such file"):
        index_shard(shard, to=tmp_path / "no" / ".wds-index" / "x.tar.index")
    (tmp_path / ".wds-index").touch()
    with pytest.raises(ShardOpenError, match="is not a folder"):
        index_shard(shard)


def test_listings_do_not_show_the_hidden_folder(tmp_path: Path) -> None:
    """Not of folders, nor of patterns, locally or in a store."""
    for folder in (str(tmp_path), "memory://hidden-indexes"):
        with ShardWriter(f"{folder}/x-%d.tar", max_count=1, index=True) as writer:
            for key in "ab":
                writer.write({"__key__": key, "txt": "x"})
        names = [f"{folder}/x-0.tar", f"{folder}/x-1.tar"]
        for pattern in ("/", "/*", "/**"):
            assert list(list_urls(folder + pattern)) == names, pattern
        assert len(list(IterableWrapper([f"{folder}/"]).list_shards())) == 2
    for number in range(2):
        remove_target(f"memory://hidden-indexes/x-{number}.tar")
        remove_target(f"memory://hidden-indexes/.wds-index/x-{number}.tar.index")


def test_writer_replaces_an_index_of_another_shard_in_the_hidden_folder(tmp_path: Path) -> None:
    """One left by a writer that was killed, or of a shard that was removed, is never taken for the new shard's."""
    shard = str(tmp_path / "x-0.tar")
    for place in (index_url(shard), old_index_url(shard)):
        write_tar(tmp_path / "x-0.tar", text_samples("s", 2))
        index_shard(shard, to=place)
        os.unlink(shard)  # noqa: PTH108 - a str
        with ShardWriter(str(tmp_path / "x-%d.tar")) as writer:
            writer.write({"__key__": "a", "txt": "x"})
        assert local_index(shard) is None
        os.unlink(shard)  # noqa: PTH108 - a str
