"""The command ``ls``."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.kits.shards import sample_members, tar_bytes, text_keys, text_samples, write_tar, write_text_shards
from tests.kits.tar_blocks import END, pax_sparse
from tests.kits.tool_kit import run_wds
from torchdata_wds.format.index.columns import key_check
from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.storage.sources.local import LocalFile

MEMBERS = [*sample_members("a/1", cls=b"1", jpg=b"x" * 1234), *sample_members("a/02", jpg=b"x" * 20, txt=b"")]


def listed(*arguments: object, **options: Any) -> list[dict[str, Any]]:
    """The lines of ``--json``."""
    done = run_wds("ls", "--json", *arguments, **options)
    assert done.status == 0, done.err
    return [json.loads(line) for line in done.text.splitlines()]


def test_ls_has_a_line_for_each_sample_when_run(tmp_path: Path) -> None:
    """Key, fields and sizes, in columns that grow; counts of the shard go to stderr."""
    path = write_tar(tmp_path / "x.tar", MEMBERS)
    done = run_wds("ls", path)
    assert done.text == "a/1  cls 1 B  jpg 1.2 KB\na/02  jpg   20 B  txt 0 B\n"
    assert (
        done.err == f"wds: {path}: 2 samples, 4 members, 1,255 bytes\nwds: 1 shard: 2 samples, 4 members, 1,255 bytes\n"
    )
    assert done.status == 0


def test_ls_writes_json_when_asked(tmp_path: Path) -> None:
    """Every line of standard output is one object."""
    path = write_tar(tmp_path / "x.tar", MEMBERS)
    assert listed(path) == [
        {"key": "a/1", "shard": path, "fields": {"cls": 1, "jpg": 1234}, "bytes": 1235},
        {"key": "a/02", "shard": path, "fields": {"jpg": 20, "txt": 0}, "bytes": 20},
    ]


def test_ls_counts_by_shard_when_only_totals_are_asked_for(tmp_path: Path) -> None:
    """Then the counts are the data."""
    first, second = write_text_shards(tmp_path, (2, 1))
    done = run_wds("ls", "-q", first, second)
    assert done.text.splitlines() == [
        f"{first}: 2 samples, 6 members, 60 bytes",
        f"{second}: 1 sample, 3 members, 30 bytes",
        "2 shards: 3 samples, 9 members, 90 bytes",
    ]
    assert done.err == ""
    assert [json.loads(line) for line in run_wds("ls", "-q", "--json", first, second).text.splitlines()] == [
        {"shard": first, "samples": 2, "members": 6, "bytes": 60},
        {"shard": second, "samples": 1, "members": 3, "bytes": 30},
        {"shards": 2, "samples": 3, "members": 9, "bytes": 90},
    ]


def test_ls_lists_the_slices_when_asked(tmp_path: Path) -> None:
    """Of the whole stream, of each shard, or both."""
    urls = write_text_shards(tmp_path, (5, 3))
    pattern = tmp_path / "*.tar"
    keys = [sample["key"] for sample in listed(*urls)]
    assert keys == [f"s0-{number:05d}" for number in range(5)] + [f"s1-{number:05d}" for number in range(3)]
    assert [sample["key"] for sample in listed("--slice", "1:7:2", pattern)] == keys[1:7:2]
    assert [sample["key"] for sample in listed("--shard-slice", "0:4:2", pattern)] == [
        keys[0],
        keys[2],
        keys[5],
        keys[7],
    ]
    assert [sample["key"] for sample in listed("--shard-slice", "1:", "--slice", "3:5", pattern)] == [keys[4], keys[6]]


def test_ls_lists_what_other_commands_read_when_a_slice_holds_wrong_samples(tmp_path: Path) -> None:
    """Those have a number, too."""
    path = write_tar(
        tmp_path / "x.tar", [("a.txt", b""), ("b.txt", b""), ("b.TXT", b""), ("c.txt", b""), ("d.txt", b"")]
    )
    for part in ("0:3", "1:2", "2:"):
        options = ["--errors", "skip", "--shard-slice", part, path]
        mine, theirs = run_wds("ls", "--json", *options), run_wds("tsv", "-f", "txt", "--no-header", *options)
        assert [json.loads(line)["key"] for line in mine.text.splitlines()] == theirs.text.split()
        assert mine.status == theirs.status


@pytest.mark.parametrize("name", ["stdin", "gzip"])
def test_ls_reads_past_the_content_when_it_cannot_seek(name: str, tmp_path: Path) -> None:
    """From a pipe, and through compression."""
    data = tar_bytes(MEMBERS)
    if name == "stdin":
        found = listed(stdin=data)
    else:
        path = tmp_path / "x.tar.gz"
        path.write_bytes(gzip.compress(data))
        found = listed(path)
    assert [sample["bytes"] for sample in found] == [1235, 20]


def test_ls_reads_headers_only_when_it_can_seek(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of a large shard is passed over."""
    path = write_tar(tmp_path / "x.tar", sample_members("a", bin=bytes(4 << 20), txt=b"x"))
    read = 0
    readinto = LocalFile.readinto

    def counted(self: LocalFile, buffer: Any) -> int:
        nonlocal read
        count = readinto(self, buffer)
        read += count
        return count

    monkeypatch.setattr(LocalFile, "readinto", counted)
    assert listed(path)[0]["bytes"] == (4 << 20) + 1
    assert 0 < read < 1 << 20


def test_ls_obeys_the_options_of_reading_when_given(tmp_path: Path) -> None:
    """As the other commands do."""
    path = write_tar(tmp_path / "x.tar", [("a.b.JPG", b"1"), ("a.b.jpg", b"22"), ("c.txt", b""), ("a.b.txt", b"3")])
    found = listed("--on-duplicate", "last", "--on-reappearing", "allow", "--keys", "last_dot", path)
    assert [(sample["key"], sample["fields"]) for sample in found] == [
        ("a.b", {"jpg": 2}),
        ("c", {"txt": 0}),
        ("a.b", {"txt": 1}),
    ]
    assert "JPG" in listed("--keep-case", "--on-reappearing", "allow", "--keys", "last_dot", path)[0]["fields"]
    open_end = tmp_path / "y.tar"
    open_end.write_bytes(tar_bytes(MEMBERS, end=b""))
    assert len(listed("--no-end-marker", open_end)) == 2
    open_end.write_bytes(tar_bytes(MEMBERS) + tar_bytes(text_samples("z", 1)))
    assert len(listed("--concatenated", open_end)) == 3


def test_ls_fails_when_a_sample_is_wrong(tmp_path: Path) -> None:
    """Status 1, or the sample is told and left out."""
    for members, says in (
        ([("a.txt", b""), ("b.txt", b""), ("a.cls", b"")], "comes back"),
        ([("a.txt", b""), ("a.TXT", b"")], "comes twice"),
    ):
        path = write_tar(tmp_path / "x.tar", [*members, ("z.txt", b"")])
        done = run_wds("ls", path)
        assert done.status == 1
        assert "wds ls: error: " in done.err
        assert says in done.err
        skipping = run_wds("ls", "--errors", "skip", path)
        assert skipping.status == 1
        assert "wds: skipped: " in skipping.err
        assert skipping.text.splitlines()[-1].startswith("z  ")


def test_ls_lists_what_is_whole_when_a_shard_is_cut(tmp_path: Path) -> None:
    """The next shard follows, if damage is to be skipped."""
    cut, whole = tmp_path / "a.tar", tmp_path / "b.tar"
    cut.write_bytes(tar_bytes(MEMBERS)[: 512 * 7])
    write_tar(whole, text_samples("z", 1))
    stopped = run_wds("ls", cut, whole)
    assert (stopped.status, stopped.text) == (1, "a/1  cls 1 B  jpg 1.2 KB\n")
    assert "is cut off" in stopped.err
    skipped = run_wds("ls", "--errors", "skip", cut, whole)
    assert skipped.status == 1
    assert [line.split()[0] for line in skipped.text.splitlines()] == ["a/1", "z00000"]
    assert "lost: 1 shard or sample was" in skipped.err


def test_ls_tells_members_that_belong_to_no_sample(tmp_path: Path) -> None:
    """With counts, and status 0."""
    path = write_tar(tmp_path / "x.tar", [("README", b""), (".hidden", b""), *MEMBERS, ("LICENSE", b"")])
    done = run_wds("ls", path)
    assert done.status == 0
    assert "left out 2 members that belong to no sample: no extension" in done.err
    assert "left out 1 member that belongs to no sample: hidden file" in done.err


def test_ls_escapes_names_when_they_hold_control_characters(tmp_path: Path) -> None:
    """A terminal shows them, and does nothing else."""
    path = write_tar(tmp_path / "x.tar", [("a\x1b[2J\nb.j\u202epg", b"")])
    done = run_wds("ls", path)
    assert done.text == "a\\x1b[2J\\nb  j\\u202epg 0 B\n"
    assert done.text.isascii()
    assert listed(path)[0]["key"] == "a\x1b[2J\nb"


def test_ls_counts_a_shard_when_it_is_empty_or_comes_twice(tmp_path: Path) -> None:
    """Each reading has its line, and none is no error; one that cannot be opened is no shard."""
    empty, other = write_tar(tmp_path / "x.tar", []), write_tar(tmp_path / "y.tar", [("a.txt", b"1")])
    done = run_wds("ls", empty)
    nothing = "0 samples, 0 members, 0 bytes"
    assert (done.status, done.text, done.err) == (0, "", f"wds: {empty}: {nothing}\nwds: 1 shard: {nothing}\n")
    one = f"{other}: 1 sample, 1 member, 1 byte"
    several = run_wds("ls", "-q", "--errors", "skip", other, empty, tmp_path / "no.tar", other)
    assert several.text.splitlines() == [one, f"{empty}: {nothing}", one, "3 shards: 2 samples, 2 members, 2 bytes"]


def test_ls_lists_by_the_index_what_it_lists_from_the_shard(tmp_path: Path) -> None:
    """The same lines, sizes and totals, with every option that chooses; the shard's content is not read."""
    urls = write_text_shards(tmp_path, (3, 0, 2))
    path = write_tar(tmp_path / "x.tar", [("a/1.b.JPG", b"12"), ("README", b""), *MEMBERS])
    assert run_wds("index", *urls, path, "-p", "1").status == 0
    for options in (
        (),
        ("--json",),
        ("-q",),
        ("--slice", "1:5:2"),
        ("--shard-slice", "1:2", "--json"),
        ("--keep-case",),
    ):
        by_shard, by_index = (run_wds("ls", *options, *more, *urls, path) for more in ((), ("--index",)))
        assert (by_index.status, by_index.out) == (by_shard.status, by_shard.out)
    before = run_wds("ls", "--index", path)
    Path(path).write_bytes(bytes(Path(path).stat().st_size))
    assert run_wds("ls", "--index", path) == before


def test_ls_refuses_an_index_that_does_not_fit(tmp_path: Path) -> None:
    """None, of another version, of other keys, or without a size; the next shard follows if damage is skipped."""
    none, other, good = (write_tar(tmp_path / f"{name}.tar", text_samples("s", 1)) for name in "abc")
    sparse = tmp_path / "d.tar"
    sparse.write_bytes(pax_sparse([(512, 512)], 2000, b"x" * 512) + END)
    assert run_wds("index", other, good, sparse, "-p", "1").status == 0
    done = run_wds("ls", "--index", none)
    assert (done.status, done.text) == (1, "")
    assert "a.tar" in done.err
    assert "--keys first_dot" in run_wds("ls", "--index", "--keys", "last_dot", other).err
    write_tar(Path(other), text_samples("s", 30))
    done = run_wds("ls", "--index", "--errors", "skip", other, none, sparse, good)
    assert (done.status, done.text.split()[0]) == (1, "s00000")
    assert "the index says" in done.err
    assert "which is sparse" in done.err
    assert run_wds("ls", "--index", "-").status == 2


def test_ls_lists_a_packed_index(tmp_path: Path) -> None:
    """Numbers, hashes of keys and places of samples, all or those of some shards; the shards are not opened."""
    urls = write_text_shards(tmp_path, (2, 0, 3))
    pack = tmp_path / "all.pack"
    assert run_wds("index", *urls, "--pack", pack, "-p", "1").status == 0
    index = DatasetIndex.load(pack)
    sizes = [Path(url).stat().st_size for url in urls]
    for url in urls:
        Path(url).unlink()
    done = run_wds("ls", "--pack", pack)
    hashes = [f"{key_check(key) & 0xFFFFFFFF:08x}" for key in text_keys((2, 0, 3))]
    assert done.status == 0
    assert done.text.splitlines()[1] == f"1  {hashes[1]}  {urls[0]}  3,072 B at 3,072"
    assert f"wds: {urls[2]}: 3 samples, {sizes[2]:,} bytes\n" in done.err
    assert f"wds: digest {index.digest}, --keys first_dot\n" in done.err
    done = run_wds("ls", "--pack", pack, "--json", "--slice", "2:5:2")
    assert [json.loads(line) for line in done.text.splitlines()] == [
        {"number": number, "key_hash": hashes[number], "shard": urls[2], "start": start, "size": 3072}
        for number, start in ((2, 0), (4, 6144))
    ]
    assert run_wds("ls", "-q", "--pack", pack, urls[2]).text.splitlines()[0].startswith(f"{urls[2]}: 3 samples")
    assert run_wds("ls", "--pack", pack, tmp_path / "other.tar").status == 1
    assert run_wds("ls", "--pack", pack, "--index").status == 2
