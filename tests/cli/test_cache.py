"""``wds cache``: what is in a folder, what is damaged, and what goes."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.processes import open_files
from tests.kits.shards import tar_bytes, text_samples, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli import cache
from torchdata_wds.cli.cache import CacheFile, check_file, choose_old, duration, list_cache, remove_file
from torchdata_wds.errors import CacheError
from torchdata_wds.storage.cache import ShardCache
from torchdata_wds.storage.cache.locked_files import CopyLock, Removal, open_copy
from torchdata_wds.storage.cache.sample_file import begin_samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of three shards and their samples, the first of which was used longest ago, with what a kill has left."""
    urls = write_text_shards(tmp_path / "in", (2, 3, 4))
    cache = tmp_path / "cache"
    pipe = IterableWrapper(urls).cache_shards(cache, cache_local=True).load_wds_shards().group_by_key()
    assert len(list(pipe.cache_samples(cache / "samples.db"))) == 9
    (cache / "dead-0123456789abcdef0123456789abcdef.tar.17-0123abcd.part").write_bytes(bytes(1000))
    for days, path in zip((40, 30, 20, 10, 50), sorted(cache.iterdir(), key=_age), strict=True):
        os.utime(path, (time.time() - days * 86400 - 60,) * 2)
    return cache


def _age(path: Path) -> tuple[bool, str]:
    return path.suffix == ".part", path.name.replace("samples", "z")


def names(folder: Path) -> list[str]:
    """What is in the folder, by the first parts of the names."""
    return sorted(path.name.partition(".")[0][:12] for path in folder.iterdir())


def test_list_shows_each_file_and_totals(folder: Path) -> None:
    """As lines for readers and for programs."""
    done = run_wds("cache", "list", folder)
    assert done.status == 0
    lines = done.text.splitlines()
    assert len(lines) == 6
    assert "left over" in lines[0]
    assert "7w ago" in lines[0]
    assert "5w ago" in lines[2]
    assert lines[-1].split()[1:] == ["bytes", "in", "5", "files"]
    values = [json.loads(line) for line in run_wds("cache", "list", folder, "--json").text.splitlines()]
    assert [value["state"] for value in values] == ["left over", *["whole"] * 4]
    assert sum(value["bytes"] for value in values) == int(lines[-1].split()[0].replace(",", ""))
    assert [path.name for path in sorted(folder.iterdir())] == [value["name"] for value in values]


def test_verify_reports_and_removes_what_is_damaged(folder: Path) -> None:
    """The exit status says so, until it is gone."""
    assert run_wds("cache", "verify", folder).status == 0
    copy = next(folder.glob("shard-000001-*.tar"))
    copy.write_bytes(copy.read_bytes()[:-2048])
    done = run_wds("cache", "verify", folder)
    assert (done.status, done.text.count("damaged: ")) == (1, 1)
    assert "3 files whole, 1 damaged" in done.text
    assert copy.exists()
    assert "1 removed" in run_wds("cache", "verify", folder, "--remove").text
    assert not copy.exists()
    assert run_wds("cache", "verify", folder).status == 0


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], []),
        (["--older-than", "25d"], ["samples", "shard-000002"]),
        (["--older-than", "3w"], ["samples", "shard-000002"]),
        (["--max-bytes", "TWO LESS"], ["samples", "shard-000002"]),
        (["--older-than", "99w"], ["samples", "shard-000000", "shard-000001", "shard-000002"]),
    ],
)
def test_clear_removes_leftovers_and_what_was_not_used_for_longest(
    options: list[str], left: list[str], folder: Path
) -> None:
    """A dry run says the same and removes nothing."""
    before = names(folder)
    for path in folder.glob("*.tar"):
        path.write_bytes(path.read_bytes().ljust(20480, b"\0"))
    ages = {"shard-000000": 40, "shard-000001": 30, "shard-000002": 20}
    for path in folder.glob("*.tar"):
        os.utime(path, (time.time() - ages[path.name[:12]] * 86400 - 60,) * 2)
    limit = sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".part") - 2 * 20480
    options = [str(limit) if option == "TWO LESS" else option for option in options]
    planned = run_wds("cache", "clear", folder, *options, "--dry-run")
    assert names(folder) == before
    done = run_wds("cache", "clear", folder, *options)
    assert (planned.status, done.status) == (0, 0)
    assert planned.text.replace("would be removed", "removed") == done.text
    assert names(folder) == left


def test_clear_keeps_what_is_being_read(folder: Path) -> None:
    """It says so, and that not everything was done."""
    path = next(folder.glob("shard-000000-*.tar"))
    with open_copy(str(path)):
        done = run_wds("cache", "clear", folder)
    assert done.status == 1
    assert "another process is writing or reading it" in done.err
    assert list(folder.iterdir()) == [path]


def test_clear_goes_on_behind_what_cannot_be_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and the others go."""
    path = next(folder.glob("shard-000000-*.tar"))

    def refuse(file: CacheFile) -> Removal:
        if file.path == str(path):
            raise CacheError(f"{path}\x1b cannot be removed: Permission denied")
        return remove_file(file)

    monkeypatch.setattr(cache, "remove_file", refuse)
    done = run_wds("cache", "clear", folder)
    assert (done.status, list(folder.iterdir())) == (1, [path])
    assert r"\x1b cannot be removed" in done.err
    assert "in 4 files removed" in done.text


def test_cache_refuses_a_folder_that_is_none(tmp_path: Path) -> None:
    """Nothing in it is touched; one that is not there is an empty cache."""
    write_text_shards(tmp_path, (1,))
    for action in ("list", "verify", "clear"):
        done = run_wds("cache", action, tmp_path)
        assert done.status == 1
        assert "not a cache folder" in done.err
        assert run_wds("cache", action, tmp_path / "no").status == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_cache_refuses_wrong_arguments(tmp_path: Path) -> None:
    """An action is needed, and spans of time that are some."""
    for arguments in ([], ["list"], ["tidy", tmp_path], ["clear", tmp_path, "--older-than", "7"]):
        assert run_wds("cache", *arguments).status == 2
    with pytest.raises(argparse.ArgumentTypeError, match="7d"):
        duration("7 years")
    assert [duration(text) for text in ("90s", "1.5h", "2 W")] == [90, 5400, 1209600]


SHARD = tar_bytes(text_samples("s", 3))
DAY = 86400.0


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() <= before


def own(name: str = "x", suffix: str = ".tar") -> str:
    """A name that a cache gives."""
    return f"{name}-{'0123456789abcdef' * 2}{suffix}"


def put(folder: Path, name: str, data: bytes = SHARD, *, age: float = 3600) -> Path:
    """Puts a file there that was last used some time ago."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (time.time() - age,) * 2)
    return path


def write_samples(path: Path, count: int = 3) -> Path:
    """A finished file of samples."""
    writer = begin_samples(path)
    assert writer is not None
    for number in range(count):
        writer.append(b"%d" % number * 1000)
    assert writer.finish(ended=True, pickles=False)
    return path


def found(folder: Path, **options: bool) -> dict[str, tuple[str, str]]:
    """Kind and state of each file."""
    return {os.path.relpath(file.path, folder): (file.kind, file.state) for file in list_cache(folder, **options)}


def age(folder: Path) -> None:
    """Lets all files look as if they were not new."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - 3600,) * 2)


# ------------------------------------------------------------------------------------------------------------ listing
def test_list_finds_copies_and_leaves_other_files_alone(tmp_path: Path) -> None:
    """Also those that look a little like one."""
    put(tmp_path, own())
    put(tmp_path, own("y", ".tar.gz"), b"")
    for name in ("x.tar", "notes.txt", "x.tar.part", "x.tar.lock", "my.lock", "data.db", own("a.b", "/") + "x"):
        put(tmp_path, name, b"something")
    tmp_path.joinpath(own("link")).symlink_to(tmp_path / "notes.txt")
    os.mkfifo(tmp_path / own("fifo"))
    assert found(tmp_path) == {own(): ("shard", "whole"), own("y", ".tar.gz"): ("shard", "whole")}


def test_list_finds_what_a_shard_cache_makes(tmp_path: Path) -> None:
    """Copies by any name, as far as the file system marks them."""
    source = put(tmp_path, "source.tar")
    folder = tmp_path / "cache"
    folder.mkdir()
    cache = ShardCache(str(folder), is_named_by_digest=False)
    cache.fetch(str(source), f"{folder}/plain.tar")
    cache.fetch(str(source), f"{folder}/deep/er/plain.tar")
    if not hasattr(os, "getxattr") or "user.torchdata_wds" not in os.listxattr(folder / "plain.tar"):
        pytest.skip("the file system keeps no marks")
    assert found(folder) == {"plain.tar": ("shard", "whole")}
    assert found(folder, recursive=True) == dict.fromkeys(("plain.tar", "deep/er/plain.tar"), ("shard", "whole"))


def test_list_tells_what_is_being_made_from_what_was_left_over(tmp_path: Path) -> None:
    """By locks, which end with their processes."""
    lock = CopyLock.acquire(str(tmp_path / own("now")))
    assert lock is not None
    part, file = lock.create_part()
    put(tmp_path, own("dead") + ".17-0123abcd.part")
    put(tmp_path, own("dead") + ".lock", (own("dead") + ".17-0123abcd.part").encode())
    put(tmp_path, own("empty") + ".lock", b"")
    put(tmp_path, "plain.tar.17-0123abcd.part")
    put(tmp_path, "plain.tar.lock", b"plain.tar.17-0123abcd.part")
    put(tmp_path, ".part.lock", b"")
    age(tmp_path)
    try:
        assert found(tmp_path) == {
            own("now") + ".lock": ("lock", "being made"),
            Path(part).name: ("shard", "being made"),
            own("dead") + ".17-0123abcd.part": ("shard", "left over"),
            own("dead") + ".lock": ("lock", "left over"),
            own("empty") + ".lock": ("lock", "left over"),
            "plain.tar.17-0123abcd.part": ("shard", "left over"),
            "plain.tar.lock": ("lock", "left over"),
        }
    finally:
        file.close()
        lock.release()
    assert found(tmp_path)[Path(part).name] == ("shard", "left over")


def test_list_does_not_touch_the_lock_of_what_is_new(tmp_path: Path) -> None:
    """Its maker may be about to take it."""
    put(tmp_path, own() + ".17-0123abcd.part", age=0)
    assert found(tmp_path) == {own() + ".17-0123abcd.part": ("shard", "being made")}


def test_list_finds_files_of_samples(tmp_path: Path) -> None:
    """By what is in them, whatever they are called; unfinished ones by their lock."""
    write_samples(tmp_path / "any.name")
    writer = begin_samples(tmp_path / "second.db")
    assert writer is not None
    age(tmp_path)
    try:
        assert found(tmp_path) == {"any.name": ("samples", "whole"), "second.db.part": ("samples", "being made")}
        left = (tmp_path / "second.db.part").read_bytes()
    finally:
        writer.abort()
    put(tmp_path, "third.db.part", left)
    assert found(tmp_path)["third.db.part"] == ("samples", "left over")


def test_list_refuses_what_is_no_cache(tmp_path: Path) -> None:
    """A folder of other files, and what is no folder; an empty one has nothing to say."""
    assert list_cache(tmp_path) == []
    put(tmp_path, "x.tar")
    with pytest.raises(CacheError, match="not a cache folder"):
        list_cache(tmp_path)
    with pytest.raises(CacheError, match="cannot be read"):
        list_cache(tmp_path / "x.tar")
    put(tmp_path, own("deep/x"))
    with pytest.raises(CacheError, match="recursive"):
        list_cache(tmp_path)


def test_list_and_check_are_no_use_of_a_file(tmp_path: Path) -> None:
    """The time of the last use decides which copies go first."""
    path = put(tmp_path, own(), age=9 * DAY)
    samples = write_samples(tmp_path / "s.db")
    os.utime(samples, (time.time() - 9 * DAY,) * 2)
    before = {entry: entry.stat().st_atime_ns for entry in (path, samples)}
    for file in list_cache(tmp_path):
        assert check_file(file) is None
    assert {entry: entry.stat().st_atime_ns for entry in (path, samples)} == before


# ------------------------------------------------------------------------------------------------------------ checking
def test_check_finds_damaged_copies_and_samples(tmp_path: Path) -> None:
    """Cut, changed, and of another length than when they were made."""
    put(tmp_path, own("good"))
    put(tmp_path, own("cut"), SHARD[:-2000])
    put(tmp_path, own("text", ".tar.gz"), b"<html>")
    good = write_samples(tmp_path / "good.db").read_bytes()
    place = good.rindex(b"1" * 100)
    put(tmp_path, "bad.db", good[:place] + b"x" + good[place + 1 :])
    put(tmp_path, "cut.db", good[:-1])
    cache = ShardCache(str(tmp_path))
    made = cache.fetch(str(put(tmp_path / "else", "source.tar")), str(tmp_path / own("made")))
    made.write_bytes(SHARD + bytes(10240))
    reasons = {Path(file.path).name: check_file(file) for file in list_cache(tmp_path)}
    damaged = {name for name, reason in reasons.items() if reason is not None}
    marked = {own("made")} if "user.torchdata_wds" in os.listxattr(made) else set()
    assert damaged == {own("cut"), own("text", ".tar.gz"), "bad.db", "cut.db"} | marked
    assert "cut off" in str(reasons[own("cut")])
    assert "sample 1" in str(reasons["bad.db"])


def test_check_takes_a_file_that_has_gone_as_no_damage(tmp_path: Path) -> None:
    """Another process may have removed it meanwhile."""
    for kind in ("shard", "samples"):
        assert check_file(CacheFile(str(tmp_path / "no"), kind, "whole", 1, 0)) is None  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- choosing and removing
def test_choose_takes_what_is_left_over_and_the_oldest() -> None:
    """All, those of some age, and as many as are too many; never what is being made."""
    ages = {"old": 9, "middle": 5, "new": 1}
    files = [CacheFile(name, "shard", "whole", 100, -DAY * days) for name, days in ages.items()]
    files += [CacheFile("left", "shard", "left over", 50, 0), CacheFile("made", "shard", "being made", 50, -99 * DAY)]
    for options, expected in (
        ({}, ["left", "old", "middle", "new"]),
        ({"older_than": 3 * DAY}, ["left", "old", "middle"]),
        ({"older_than": 30 * DAY}, ["left"]),
        ({"max_bytes": 200}, ["left", "old"]),
        ({"max_bytes": 199}, ["left", "old", "middle"]),
        ({"max_bytes": 300}, ["left"]),
        ({"max_bytes": 0, "older_than": 30 * DAY}, ["left", "old", "middle", "new"]),
    ):
        assert [file.path for file in choose_old(reversed(files), **options, now=0)] == expected


def test_remove_removes_what_nobody_uses(tmp_path: Path) -> None:
    """Copies, samples, leftovers and locks."""
    put(tmp_path, own())
    put(tmp_path, own("dead") + ".17-0123abcd.part")
    put(tmp_path, own("dead") + ".lock", b"")
    write_samples(tmp_path / "s.db")
    put(tmp_path, "notes.txt")
    age(tmp_path)
    files = list_cache(tmp_path)
    assert len(files) == 4
    assert [remove_file(file) for file in files] == ["removed", "gone", "removed", "removed"]  # a lock with its part
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert [remove_file(file) for file in files] == ["gone"] * 4


def test_remove_leaves_what_is_being_read_or_made(tmp_path: Path) -> None:
    """A reader, a download and a pass that writes samples go on as if nothing was."""
    path = put(tmp_path, own())
    reader = open_copy(str(path))
    lock = CopyLock.acquire(str(tmp_path / own("now")))
    assert lock is not None
    _, part = lock.create_part()
    writer = begin_samples(tmp_path / "s.db")
    assert writer is not None
    age(tmp_path)
    try:
        files = list_cache(tmp_path)
        assert len(files) == 4
        assert {remove_file(file) for file in files} == {"in use"}
        # what was left over when it was listed may be made by now
        made = next(file for file in files if file.path.endswith(".part") and file.kind == "shard")
        assert remove_file(made._replace(state="left over")) == "in use"
        assert len(list_cache(tmp_path)) == 4
        writer.append(b"x")
        assert writer.finish(ended=True, pickles=False)
        assert reader.read() == SHARD
    finally:
        writer.abort()
        part.close()
        lock.release()
        reader.close()
    assert remove_file(next(file for file in files if file.path == str(path))) == "removed"


def test_remove_does_not_follow_a_link_that_has_taken_the_place(tmp_path: Path) -> None:
    """What it points at is not the cache's."""
    path = put(tmp_path, own())
    [file] = list_cache(tmp_path)
    path.unlink()
    other = put(tmp_path, "precious.txt")
    path.symlink_to(other)
    with pytest.raises(CacheError, match="cannot be removed"):
        remove_file(file)
    assert other.exists()


def test_a_cache_works_on_when_it_was_cleared(tmp_path: Path) -> None:
    """The copy is made again."""
    source = put(tmp_path / "else", "source.tar")
    cache = ShardCache(str(tmp_path / "cache"), max_bytes=10**9)
    for _ in range(2):
        assert cache.fetch(str(source), str(tmp_path / "cache" / own())).read_bytes() == SHARD
        age(tmp_path / "cache")
        assert [remove_file(file) for file in choose_old(list_cache(tmp_path / "cache"), now=time.time())] == [
            "removed"
        ]


def test_list_shows_files_of_other_users_as_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may not be read is none of this cache's."""
    put(tmp_path, own())
    put(tmp_path, "private")

    def refuse(path: str, size: int) -> bytes:
        raise PermissionError

    monkeypatch.setattr(cache, "_read", refuse)
    assert found(tmp_path) == {own(): ("shard", "whole")}
