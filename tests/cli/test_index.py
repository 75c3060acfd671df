"""``wds index``: ours, DALI's and the list of wids, from headers alone."""

import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from tests.kits.servers import serve_folder
from tests.kits.shards import text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds import ShardIndex, ShardOpenError, TarWriter, index_shard
from torchdata_wds.cli.index.lists import listed_url
from torchdata_wds.cli.index.shard_indexes import make_index, save_index
from torchdata_wds.format.index import dali_index
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.foreign import dali_name
from torchdata_wds.format.index.sidecars import beside, index_in_folder, index_url

FIGURES = re.compile(r"[0-9,.]+(?= s\b| samples/s)")


def test_index_writes_one_beside_each_shard(tmp_path: Path) -> None:
    """The same that the library makes; nothing on standard output."""
    urls = write_text_shards(tmp_path, (3, 0, 2))
    done = run_wds("index", f"{tmp_path}/shard-*.tar", "-p", "1")
    assert (done.status, done.out) == (0, b"")
    assert FIGURES.sub("#", done.err) == "wds: 3 indexes written (5 samples of 3 shards in # s, # samples/s)\n"
    for url in urls:
        assert ShardIndex.beside(url) == index_shard(url, to=False)
    assert run_wds("index", *urls, "--keys", "last_dot", "--force", "-p", "1").status == 0
    assert ShardIndex.beside(urls[0]).header.keys == "last_dot"


def test_index_leaves_what_is_right_and_refuses_to_replace_what_is_not(tmp_path: Path) -> None:
    """One that a writer made knows more; one of another version of the shard is replaced when forced."""
    with TarWriter(tmp_path / "a.tar", index=True) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    write_tar(tmp_path / "b.tar", text_samples("s", 2))
    index_shard(tmp_path / "b.tar")
    write_tar(tmp_path / "b.tar", text_samples("s", 3))
    write_tar(tmp_path / "c.tar", text_samples("s", 1))
    (tmp_path / "c.tar.index").write_bytes(b"precious")
    own = tmp_path / ".wds-index" / "a.tar.index"
    before = own.read_bytes()
    done = run_wds("index", tmp_path, "-p", "1")
    assert done.status == 1
    assert "1 index unchanged, 2 of 3 shards failed" in done.err
    assert "--force" in done.err
    assert own.read_bytes() == before
    assert (tmp_path / "c.tar.index").read_bytes() == b"precious"
    assert run_wds("index", tmp_path, "-p", "1", "--force").status == 0
    assert own.read_bytes() == before
    assert [len(ShardIndex.beside(tmp_path / f"{name}.tar")) for name in "abc"] == [1, 3, 1]


def test_index_goes_on_behind_a_shard_that_fails(tmp_path: Path) -> None:
    """It is named, and the status says so; of a list nothing is written, for it would not be complete."""
    urls = write_text_shards(tmp_path, (3, 3, 3))
    Path(urls[1]).write_bytes(Path(urls[1]).read_bytes()[:1000])
    done = run_wds("index", *urls, f"{tmp_path}/no.tar", "-p", "1")
    assert done.status == 1
    assert f"not indexed: shard {urls[1]} is cut off" in done.err
    assert "no.tar: it does not exist" in done.err
    assert "2 indexes written, 2 of 4 shards failed" in done.err
    assert sorted(path.name for path in tmp_path.glob(".wds-index/*.index")) == [
        "shard-000000.tar.index",
        "shard-000002.tar.index",
    ]
    done = run_wds("index", *urls, "--wids", tmp_path / "list.json", "-p", "1")
    assert done.status == 1
    assert "list.json is not written: 1 shard would be missing" in done.err
    assert not (tmp_path / "list.json").exists()


def test_index_writes_those_of_dali(tmp_path: Path) -> None:
    """Named as DALI's own program does, beside the shards or in a folder that is made."""
    urls = write_text_shards(tmp_path / "in.v1", (2, 1))
    assert run_wds("index", "--dali", *urls, "-p", "1").status == 0
    assert run_wds("index", "--dali", *urls, "-o", tmp_path / "out", "-p", "1").status == 0
    for number, url in enumerate(urls):
        name = f"shard-{number:06d}.idx"
        expected = dali_index(index_shard(url, to=False))
        assert (tmp_path / "in.v1" / name).read_text() == (tmp_path / "out" / name).read_text() == expected
    assert "2 indexes unchanged" in run_wds("index", "--dali", *urls, "-p", "1").err
    done = run_wds("index", "--dali", write_tar(tmp_path / "empty.tar", []), "-p", "1")
    assert (done.status, "has no sample" in done.err) == (1, True)


def test_index_writes_a_list_for_wids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With paths from its own folder, sizes, counts and digests."""
    urls = write_text_shards(tmp_path / "in", (2, 1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lists").mkdir()
    relative = [os.path.relpath(url) for url in urls]
    arguments = ("--wids", "lists/all.json", "--md5", "--name", "mine", "-p", "1")
    assert run_wds("index", *relative, *arguments).status == 0
    content = json.loads((tmp_path / "lists" / "all.json").read_text())
    assert content["name"] == "mine"
    assert content["shardlist"] == [
        {
            "url": f"../in/shard-{number:06d}.tar",
            "nsamples": count,
            "filesize": Path(url).stat().st_size,
            "md5sum": hashlib.md5(Path(url).read_bytes()).hexdigest(),
        }
        for number, (url, count) in enumerate(zip(urls, (2, 1), strict=True))
    ]
    assert not list((tmp_path / "in").rglob("*.index"))
    assert run_wds("index", *relative, *arguments).status == 0
    done = run_wds("index", relative[0], "--wids", "lists/all.json", "-p", "1")
    assert (done.status, "--force" in done.err) == (1, True)
    assert run_wds("index", relative[0], "--wids", "lists/all.json", "-p", "1", "--force").status == 0
    done = run_wds("index", urls[0], "--wids", "-", "-p", "1")
    assert json.loads(done.out)["shardlist"][0]["url"] == urls[0]
    assert FIGURES.sub("#", done.err) == "wds: 1 shard listed (2 samples of 1 shard in # s, # samples/s)\n"
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(Path(urls[0]).read_bytes()))
    done = run_wds("index", "x.tar.gz", "--wids", "-", "-p", "1")
    assert (done.status, done.out) == (1, b"")
    assert "compressed" in done.err
    assert "listed" not in done.err


def test_index_writes_one_packed_file(tmp_path: Path) -> None:
    """Of all shards in their order, as the library makes it; not if a shard is missing from it."""
    urls = write_text_shards(tmp_path, (3, 0, 2))
    pack = tmp_path / "all.pack"
    done = run_wds("index", *urls, "--pack", pack, "-p", "1")
    assert (done.status, done.out) == (0, b"")
    assert done.err.startswith("wds: 3 shards packed (5 samples of 3 shards in ")
    expected = DatasetIndex.of([(url, index_shard(url, to=False)) for url in urls])
    assert DatasetIndex.load(pack) == expected
    assert not list(tmp_path.rglob("*.index"))
    before = pack.stat()
    assert run_wds("index", *urls, "--pack", pack, "-p", "1").status == 0
    assert pack.stat() == before
    refused = run_wds("index", urls[0], "--pack", pack, "-p", "1")
    assert (refused.status, "--force" in refused.err) == (1, True)
    assert run_wds("index", urls[0], "--pack", pack, "--force", "-p", "1").status == 0
    assert len(DatasetIndex.load(pack)) == 3
    done = run_wds("index", *urls, tmp_path / "no.tar", "--pack", tmp_path / "new", "-p", "1")
    assert done.status == 1
    assert "new is not written: 1 shard would be missing from it" in done.err
    assert not (tmp_path / "new").exists()


def test_index_packs_indexes_that_fit_without_reading_the_shards(tmp_path: Path) -> None:
    """Shards without one, and with one of another version, are scanned."""
    urls = write_text_shards(tmp_path, (3, 3, 2))
    assert run_wds("index", *urls[:2], "-p", "1").status == 0
    write_tar(Path(urls[1]), text_samples("s", 4))
    path = Path(urls[0])
    status = path.stat()
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert run_wds("index", *urls, "--pack", tmp_path / "all.pack", "-p", "1").status == 0
    assert [entry.samples for entry in DatasetIndex.load(tmp_path / "all.pack").shards] == [3, 4, 2]


def test_index_shows_names_of_strangers_as_they_are_safe(tmp_path: Path) -> None:
    """Nothing in a name acts on a terminal, and each failure has one line."""
    path = tmp_path / "x.tar"
    write_tar(path, [("\x1b[2Jfoo\n.txt", b"x" * 1000)])
    path.write_bytes(path.read_bytes()[:1000])
    lines = run_wds("index", path, "-p", "1").err.splitlines()
    assert len(lines) == 2
    assert r"\x1b[2Jfoo\n.txt" in lines[0]


def test_index_refuses_wrong_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    for arguments, says in (
        ([], "SHARDS"),
        (["-"], "no place beside"),
        (["-", "-o", "out"], "no name"),
        (["pipe:cat x.tar"], "no place beside"),
        (["pipe:cat x.tar", "--wids", "list.json"], "a list cannot refer to"),
        (["x.tar", "--md5"], "--wids"),
        (["x.tar", "--name", "x"], "--wids"),
        (["x.tar", "--wids", "list.json", "-o", "out"], "-o"),
        (["pipe:cat x.tar", "--pack", "x.pack"], "a list cannot refer to"),
        (["x.tar", "--pack", "x.pack", "--part", "0/2"], "--part"),
        (["x.tar", "--pack", "x.pack", "-o", "out"], "-o"),
        (["x.tar", "--pack", "x.pack", "--check", "--dali"], "--check"),
        (["a/x.tar", "b/x.tar", "-o", "out"], "share the index"),
        (["a.1.tar", "a.2.tar", "--dali"], "share the index"),
        (["x.tar", "--keys", "other"], "--keys"),
        (["x.tar", "--check", "--force"], "--check"),
        (["x.tar", "--check", "--wids", "list.json"], "--check"),
    ):
        done = run_wds("index", *arguments)
        assert done.status == 2
        assert says in done.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_index_works_on_several_processes(tmp_path: Path) -> None:
    """The default; with the same result, and errors that come back."""
    urls = write_text_shards(tmp_path, (3, 0, 2, 5, 1))
    Path(urls[3]).write_bytes(b"no tar")
    done = run_wds("index", tmp_path, "-p", "2")
    assert done.status == 1
    assert f"not indexed: shard {urls[3]} is not a tar archive" in done.err
    for url in (*urls[:3], urls[4]):
        assert ShardIndex.beside(url) == index_shard(url, to=False)


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
    assert {name: beside(name, dali_name) for name in names} == names
    with pytest.raises(ValueError, match="no place"):
        beside("-", dali_name)


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
    with pytest.raises(ShardOpenError, match="a different one exists"):
        save_index(other, url)
    assert ShardIndex.load(url) == index
    assert save_index(other, url, overwrite=True) == "written"
    assert ShardIndex.load(url) == other
    with pytest.raises(ShardOpenError, match="a different one exists"):
        save_index(b"x", url)
    with pytest.raises(ShardOpenError, match="does not exist"):
        save_index(b"x", str(tmp_path / "no" / "x.idx"))
    with pytest.raises(ShardOpenError, match="folder"):
        save_index(b"x", str(tmp_path), overwrite=True)


def test_save_replaces_the_index_of_a_shard_that_was_touched(tmp_path: Path) -> None:
    """Its samples are the same, so nobody has to force it; one that does not tell the version stays."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    index, url = index_shard(shard), index_url(shard)
    os.utime(shard, ns=(1, 1))
    touched = index_shard(shard, to=False)
    assert (index.header.tag, touched.header.tag) == (f"mtime-{index.header.tag[6:]}", "mtime-1")
    assert save_index(touched, url) == "written"
    assert ShardIndex.load(url).header.tag == "mtime-1"
    touched.header = touched.header._replace(tag=None)
    touched.save(url)
    assert save_index(index, url) == "unchanged"


def test_save_works_in_stores() -> None:
    """As in local folders."""
    assert save_index(b"x", "memory://index-files/x.idx") == "written"
    assert save_index(b"x", "memory://index-files/x.idx") == "unchanged"
    with pytest.raises(ShardOpenError, match="a different one exists"):
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
