"""Where indexes lie, and that none is replaced by chance."""

import hashlib
from pathlib import Path

import pytest

from tests.kits.servers import serve_folder
from tests.kits.shards import text_samples, write_tar
from torchdata_wds import ShardIndex, ShardOpenError, index_shard
from torchdata_wds.cli.index import dali_index_url, index_in_folder, listed_url, make_index, save_index


def test_dali_index_url_is_that_of_its_own_program() -> None:
    """All behind the first dot of the base name goes, a first character that is a dot stays."""
    names = {
        "x.tar": "x.idx",
        "a.b/x.y.tar": "a.b/x.idx",
        "plain": "plain.idx",
        ".hidden.tar": ".hidden.idx",
        "file:///a/x.tar": "file:///a/x.idx",
        "https://h/x.tar?a=1.tar": "https://h/x.idx?a=1.tar",
        "simplecache::s3://b/x.tar": "simplecache::s3://b/x.idx",
        "zip://x.tar::s3://b/a.zip": "zip://x.idx::s3://b/a.zip",
        "a?b/x.tar": "a?b/x.idx",
    }
    assert {name: dali_index_url(name) for name in names} == names
    with pytest.raises(ValueError, match="no place"):
        dali_index_url("-")


def test_index_in_folder_has_the_name_of_the_shard() -> None:
    """In folders and stores; what has no name is refused."""
    assert index_in_folder("s3://b/x.tar?versionId=3", "s3://b/indexes/") == "s3://b/indexes/x.tar.index"
    assert index_in_folder("d/x.tar", "/") == "/x.tar.index"
    for url in ("-", "pipe:cat x.tar", "d/.."):
        with pytest.raises(ValueError, match="no name"):
            index_in_folder(url, "out")


def test_listed_url_is_found_from_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths change, others do not."""
    monkeypatch.chdir(tmp_path)
    assert listed_url("in/x.tar", "out/list.json") == "../in/x.tar"
    assert listed_url("in/x.tar", "s3://b/list.json") == f"{tmp_path}/in/x.tar"
    for url in ("/in/x.tar", "s3://b/x.tar", "https://h/x.tar"):
        assert listed_url(url, "out/list.json") == url


def test_save_replaces_only_when_told_to(tmp_path: Path) -> None:
    """What is the same is left, also where it could not be written."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    index, other = index_shard(shard, to=False), index_shard(shard, to=False, keys="last_dot")
    url = str(tmp_path / "x.tar.index")
    assert save_index(index, url) == "written"
    assert save_index(index, url) == "unchanged"
    with pytest.raises(ShardOpenError, match="another one is there"):
        save_index(other, url)
    assert ShardIndex.load(url) == index
    assert save_index(other, url, overwrite=True) == "written"
    assert ShardIndex.load(url) == other
    with pytest.raises(ShardOpenError, match="another one is there"):
        save_index(b"x", url)
    with pytest.raises(ShardOpenError, match="does not exist"):
        save_index(b"x", str(tmp_path / "no" / "x.idx"))
    with pytest.raises(ShardOpenError, match="folder"):
        save_index(b"x", str(tmp_path), overwrite=True)


def test_save_works_in_stores() -> None:
    """As in local folders."""
    assert save_index(b"x", "memory://index-files/x.idx") == "written"
    assert save_index(b"x", "memory://index-files/x.idx") == "unchanged"
    with pytest.raises(ShardOpenError, match="another one is there"):
        save_index(b"y", "memory://index-files/x.idx")


def test_make_index_reads_shards_from_anywhere(tmp_path: Path) -> None:
    """What a server's shard lacks, its stored size, is no difference."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    own = str(tmp_path / "own.index")
    index_shard(shard, to=own)
    with serve_folder(tmp_path) as server:
        result = make_index((f"{server}/x.tar", own), md5=True)
        refused = make_index((f"{server}/x.tar", f"{server}/x.tar.index"))
    assert (result.outcome, result.failure) == ("unchanged", None)
    assert result.md5 == hashlib.md5(Path(shard).read_bytes()).hexdigest()
    assert isinstance(refused.failure, ShardOpenError)
