"""``wds cache``: what is in a folder, what is damaged, and what goes."""

import argparse
import json
import os
import time
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli import cache
from torchdata_wds.cli.cache import CacheFile, duration, remove_file
from torchdata_wds.errors import CacheError
from torchdata_wds.storage.cache.locked_files import Removal, open_copy


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
    assert "another process makes or reads it" in done.err
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
