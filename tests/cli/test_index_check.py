"""``wds index --check``: existing indexes compared with their shards."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kits.shards import sample_members, text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import Result, run_wds
from torchdata_wds import ShardIndex, TarWriter, index_shard
from torchdata_wds.cli.index.comparison import difference, packed_difference
from torchdata_wds.format.index.columns import ShardColumns
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.packed import COMPRESSED, SPECIAL
from torchdata_wds.storage.byte_streams import StoredVersion


def check(*arguments: object) -> Result:
    """Runs it in this process."""
    return run_wds("index", "--check", *arguments, "-p", "1")


def test_check_is_silent_about_indexes_that_are_right(tmp_path: Path) -> None:
    """Those of a writer, which know a digest, and those made from headers; nothing is written."""
    with TarWriter(tmp_path / "a.tar", index=True) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    write_tar(tmp_path / "b.tar", text_samples("s", 3))
    assert run_wds("index", tmp_path / "b.tar", "-p", "1").status == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = check(tmp_path)
    assert (done.status, done.out) == (0, b"")
    assert done.err.startswith("wds: 2 indexes right (4 samples of 2 shards in ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_check_has_a_line_for_each_index_that_is_missing_stale_or_wrong(tmp_path: Path) -> None:
    """Which says what differs; the summary counts them, and the status is 1."""
    urls = write_text_shards(tmp_path, (3, 3, 3, 3))
    folder = tmp_path / "indexes"
    assert run_wds("index", *urls, "-o", folder, "-p", "1").status == 0
    (folder / "shard-000000.tar.index").unlink()
    write_tar(Path(urls[1]), text_samples("s", 30))
    (folder / "shard-000002.tar.index").write_text("precious\n")
    done = check(*urls, "-o", folder)
    lines = done.text.splitlines()
    assert done.status == 1
    assert lines[0] == f"{urls[0]}: missing: it has no index {folder}/shard-000000.tar.index"
    assert lines[1].startswith(
        f"{urls[1]}: stale: {folder}/shard-000001.tar.index is of another version of the shard, which has "
    )
    assert lines[2].startswith(f"{urls[2]}: wrong: {folder}/shard-000002.tar.index is not an index of a shard")
    assert len(lines) == 3
    assert "1 index right, 1 index missing, 1 index stale, 1 index wrong (39 samples of 4 shards" in done.err


def test_check_goes_on_after_a_shard_that_cannot_be_read(tmp_path: Path) -> None:
    """That is a failure of the shard, not of its index."""
    urls = write_text_shards(tmp_path, (3, 3))
    assert run_wds("index", *urls, "-p", "1").status == 0
    Path(urls[0]).write_bytes(Path(urls[0]).read_bytes()[:1000])
    done = check(*urls)
    assert (done.status, done.out) == (1, b"")
    assert f"not checked: shard {urls[0]} is cut off" in done.err
    assert "1 index right, 1 of 2 shards failed" in done.err


def test_check_compares_the_digest_of_a_shard_that_was_touched(tmp_path: Path) -> None:
    """If the index has one; else the headers do not tell whether it is still the same."""
    with TarWriter(tmp_path / "a.tar", index=True) as writer:
        writer.write({"__key__": "a", "txt": "x"})
    write_tar(tmp_path / "b.tar", text_samples("s", 1))
    assert run_wds("index", tmp_path / "b.tar", "-p", "1").status == 0
    for name in ("a.tar", "b.tar"):
        os.utime(tmp_path / name, ns=(1, 1))
    done = check(tmp_path)
    assert done.status == 1
    assert done.text.startswith(f"{tmp_path}/b.tar: stale: ")
    assert "which has the mtime 1, expected " in done.text
    assert done.text.count("\n") == 1
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes().replace(b"x" + bytes(511), b"y" + bytes(511)))
    assert f"{tmp_path}/a.tar: stale: " in check(tmp_path).text


def test_check_compares_the_files_of_dali(tmp_path: Path) -> None:
    """Line by line."""
    shard = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    assert run_wds("index", "--dali", shard, "-p", "1").status == 0
    assert check("--dali", shard).status == 0
    path = tmp_path / "x.idx"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    done = check("--dali", shard)
    assert (done.status, done.text.startswith(f"{shard}: wrong: line 3 of {path} is ''; expected ")) == (1, True)


@pytest.mark.slow
def test_check_works_in_several_processes(tmp_path: Path) -> None:
    """The default, with lines in the order of the shards."""
    urls = write_text_shards(tmp_path, (3, 0, 2, 5))
    assert run_wds("index", urls[1], "-p", "1").status == 0
    done = run_wds("index", "--check", *urls, "-p", "2")
    assert done.status == 1
    assert [line.partition(": missing")[0] for line in done.text.splitlines()] == [urls[0], urls[2], urls[3]]


MEMBERS = [*sample_members("a", txt=b"1", cls=b"2"), *sample_members("b", txt=b"3" * 600)]


@pytest.mark.parametrize(
    ("change", "fault", "says"),
    [
        ({"shard": "y.tar"}, "wrong", "is the index of 'y.tar'"),
        ({"keys": "last_dot"}, "wrong", "was made with --keys last_dot, not first_dot"),
        ({"tar_bytes": 20480}, "stale", ", expected 20,480"),
        ({"bytes": 99}, "stale", " bytes, expected 99"),
        ({"compressed": True}, "stale", "which is not compressed now"),
        ({"special": ["hard_links"]}, "wrong", "says that it has hard links; it has nothing special"),
        ({"samples": 1}, "wrong", "has 1 sample; the shard has 2"),
        ({"rows": ('"b"', '"c"')}, "wrong", "sample 1 is 'c' at bytes 2,048 to 3,584 in its index; 'b' at bytes"),
        ({"rows": (",512,", ",513,")}, "wrong", "sample 0, 'a' at bytes 0 to 2,048, has other members in its index"),
        ({"bytes": None, "sha256": "0"}, None, ""),
    ],
)
def test_difference_names_the_first(change: dict[str, object], fault: str | None, says: str, tmp_path: Path) -> None:
    """Of the headers, then of the samples; what only one index knows is not compared."""
    write_tar(tmp_path / "x.tar", MEMBERS)
    assert run_wds("index", tmp_path / "x.tar", "-p", "1", "-o", tmp_path).status == 0
    path = tmp_path / "x.tar.index"
    index = ShardIndex.load(path)
    head, *rows = path.read_text().splitlines()
    if isinstance(pair := change.get("rows"), tuple):
        rows = [row.replace(*pair) for row in rows]
    if change.get("samples") == 1:
        rows.pop()
    header = json.loads(head) | {name: value for name, value in change.items() if name != "rows"}
    path.write_text("\n".join((json.dumps(header), *rows, "")))
    found = difference(ShardIndex.load(path), index, "its index")
    assert (found is None) == (fault is None)
    if found is not None:
        assert found[0] == fault
        assert says in found[1]


def test_check_compares_a_packed_index_shard_by_shard(tmp_path: Path) -> None:
    """One line for each that it lacks, or about which it is wrong."""
    urls = write_text_shards(tmp_path, (3, 3, 3))
    pack = tmp_path / "all.pack"
    assert run_wds("index", *urls[:2], "--pack", pack, "-p", "1").status == 0
    assert check(*urls[:2], "--pack", pack).status == 0
    write_tar(Path(urls[1]), text_samples("s", 30))
    done = check(*urls, "--pack", pack)
    lines = done.text.splitlines()
    assert (done.status, len(lines)) == (1, 2)
    assert lines[0].startswith(f"{urls[1]}: stale: {pack} is of another version of the shard, which has ")
    assert lines[1] == f"{urls[2]}: missing: {pack} does not have it"
    assert check(urls[0], "--pack", pack, "--keys", "last_dot").text.endswith("--keys first_dot, not last_dot\n")
    done = check(urls[0], "--pack", tmp_path / "none")
    assert (done.status, done.out) == (1, b"")


@pytest.mark.parametrize(
    ("change", "fault", "says"),
    [
        ({}, None, ""),
        ({"tar_bytes": 20480}, "stale", "which has an archive of 20,480 bytes"),
        ({"version": StoredVersion(99)}, "stale", "which has 99 bytes, expected "),
        ({"version": None}, None, ""),
        ({"flags": COMPRESSED}, "stale", "which is compressed now"),
        ({"flags": SPECIAL}, "wrong", "about hard links"),
        ({"offsets": np.array([0, 2048], np.uint64)}, "wrong", "has 2 samples of it; the shard has 1"),
        ({"offsets": np.array([0, 2049, 3584], np.uint64)}, "wrong", "sample 1 is at byte 2,048 in it; at 2,049"),
        ({"offsets": np.array([0, 2048, 3585], np.uint64)}, "wrong", "the end of sample 1 is at byte 3,584 in it"),
        ({"hashes": np.array([5, 6], np.uint64)}, "wrong", "sample 0 has another key in it"),
        ({"hashes": None}, None, ""),
    ],
)
def test_packed_difference_names_the_first(
    change: dict[str, Any], fault: str | None, says: str, tmp_path: Path
) -> None:
    """Of the shard as a whole, then of its samples."""
    index = index_shard(write_tar(tmp_path / "x.tar", MEMBERS), to=False)
    columns = ShardColumns.of("x.tar", index)._replace(**change)
    found = packed_difference(DatasetIndex.of([("x.tar", index)]), columns, "first_dot", "it")
    assert (None if found is None else found[0]) == fault
    assert found is None or says in found[1]
