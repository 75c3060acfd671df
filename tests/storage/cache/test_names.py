"""What copies are called: never two shards alike, and never outside the folder."""

import re
from pathlib import Path
from typing import Any

import pytest

from torchdata_wds.errors import CacheError
from torchdata_wds.storage.cache.names import check_naming, copy_name, digest_of, is_own_name, names_a_tar, unsigned

URLS = [
    "s3://a/x/train-000.tar",
    "s3://b/y/train-000.tar",
    "gs://a/x/train-000.tar",
    "https://a/train-000.tar?v=1",
    "https://a/train-000.tar?v=2",
    "https://a/train-000.tar?X-Amz-Signature=1",
    "simplecache::s3://a/x/train-000.tar",
    "pipe:curl -s https://a/train-000.tar",
    "pipe:cat /data/train-000.tar | pv",
]


def test_copy_names_differ_when_urls_do() -> None:
    """By host, folder, query, scheme and command; the shard's own name can be read in them."""
    found = [copy_name(url) for url in URLS]
    assert len(set(found)) == len(URLS)
    assert all(re.fullmatch(r"train-000-[0-9a-f]{32}\.tar", name) for name in found)
    assert all(map(is_own_name, found))


@pytest.mark.parametrize(
    ("url", "suffix"),
    [
        ("s3://b/x.tar.gz", ".tar.gz"),
        ("s3://b/x.TGZ", ".tgz"),
        ("s3://b/x.tar.zst", ".tar.zst"),
        ("s3://b/x.cbor", ".cbor"),
        ("s3://b/x.mp.gz", ".mp.gz"),
        ("https://h/download?id=3", ".tar"),
        ("s3://b/x.part", ".tar"),
        ("s3://b/x.lock", ".tar"),
    ],
)
def test_copy_names_keep_the_suffix_when_there_is_one(url: str, suffix: str) -> None:
    """What reads the folder by other means sees what the files are; nothing looks unfinished."""
    name = copy_name(url)
    assert re.fullmatch(rf"\w+-[0-9a-f]{{32}}{re.escape(suffix)}", name)
    assert is_own_name(name)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/",
        "s3://b/..",
        "s3://b/a b\n/ü?.tar",
        "s3://b/" + "x" * 500,
        "http://h/%2e%2e%2f",
        "abc://\udcff",
        "pipe:",
    ],
)
def test_copy_names_are_plain_when_urls_are_odd(url: str) -> None:
    """No path leads out of the folder, and no file system is asked too much."""
    assert re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,180}", copy_name(url))
    assert is_own_name(copy_name(url))


def test_copy_names_tell_local_files_apart_when_paths_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x.tar of one folder is not x.tar of another; a path and its file: URL are the same file."""
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path)
    here = copy_name("x.tar")
    monkeypatch.chdir(tmp_path / "a")
    assert copy_name("x.tar") != here
    assert digest_of("../x.tar") == digest_of(f"file://{tmp_path}/x.tar") == digest_of(str(tmp_path / "x.tar"))


def test_copy_names_leave_out_signatures_when_unsigned_is_asked_for() -> None:
    """The same object signed on two days has one copy; another version of it has another."""
    url = "https://h/a/x.tar"
    signed = [
        f"{url}?X-Amz-Algorithm=AWS4&X-Amz-Date=1&X-Amz-Expires=9&X-Amz-Signature=1",
        f"{url}?X-Goog-Algorithm=G&x-goog-signature=2",
        f"{url}?AWSAccessKeyId=A&Signature=3&Expires=1",
        f"{url}?Expires=1&Signature=4&Key-Pair-Id=K",
        f"{url}?sv=2020&sp=r&se=2024&sig=5",
    ]
    assert {unsigned(one) for one in signed} == {url}
    assert {copy_name(one, "unsigned") for one in signed} == {copy_name(url)}
    assert unsigned(f"{url}?sp=3&Expires=never&versionId=2") == f"{url}?sp=3&Expires=never&versionId=2"
    assert copy_name(f"{signed[0]}&versionId=2", "unsigned") == copy_name(f"{url}?versionId=2")
    assert copy_name("pipe:curl h/x.tar?sig=1", "unsigned") != copy_name("pipe:curl h/x.tar?sig=2", "unsigned")


@pytest.mark.parametrize(
    ("url", "basename", "path"),
    [
        ("s3://bucket/a/x.tar?versionId=3", "x.tar", "bucket/a/x.tar"),
        ("https://me:pw@host:80/a/x%20y.tar", "x y.tar", "host:80/a/x y.tar"),
        ("simplecache::s3://bucket/a/x.tar", "x.tar", "bucket/a/x.tar"),
        ("s3://bucket//a//x.tar", "x.tar", "bucket/a/x.tar"),
        ("/data/a/x.tar", "x.tar", "data/a/x.tar"),
    ],
)
def test_copy_names_are_those_of_filled_folders_when_asked_for(url: str, basename: str, path: str) -> None:
    """As `aws s3 cp`, `wget` and `aws s3 sync` leave them."""
    assert copy_name(url, "basename") == basename
    assert copy_name(url, "path") == path


def test_copy_names_find_the_shard_in_a_command_when_basenames_are_asked_for() -> None:
    """The last word that looks like a shard."""
    assert copy_name("pipe:curl -s -L 'https://h/a/x-1.tar?sig=2' | gunzip", "basename") == "x-1.tar"
    with pytest.raises(CacheError, match="the command names no file"):
        copy_name("pipe:generate 3", "basename")
    with pytest.raises(CacheError, match="pass a function as name="):
        copy_name("pipe:cat x.tar", "path")


@pytest.mark.parametrize(
    "made", ["../x.tar", "/x.tar", "a/../../x", "", ".", "a/", None, 3, b"x", "x.part", "a\0b", "x.lock"]
)
def test_copy_names_stay_inside_the_folder_when_a_function_gives_them(made: Any) -> None:
    """Nor may a copy look like an unfinished one."""
    with pytest.raises(CacheError, match=r"shard s3://b/x\.tar has no place in the cache"):
        copy_name("s3://b/x.tar", lambda url: made)
    assert copy_name("s3://b/x.tar", lambda url: Path("a", "b.tar")) == "a/b.tar"


@pytest.mark.parametrize("url", ["http://h/%2e%2e/%2e%2e/x.tar", "s3://../x.tar", "http://h/a%2f..%2f..%2f..%2fx.tar"])
def test_copy_names_stay_inside_the_folder_when_a_url_leads_out(url: str) -> None:
    """A list of shards may come from a stranger."""
    with pytest.raises(CacheError, match="inside the cache folder"):
        copy_name(url, "path")


def test_copy_names_show_no_secret_when_there_is_none_to_give() -> None:
    """The error masks what the URL holds."""
    with pytest.raises(CacheError) as caught:
        copy_name("https://me:secret@h/..?sig=secret", "path")
    assert "secret" not in str(caught.value)


def test_check_naming_refuses_what_is_no_way_of_naming() -> None:
    """A word that means nothing, and what is no function."""
    with pytest.raises(ValueError, match="'unsigned', 'basename', 'path' or a function"):
        check_naming("url")
    with pytest.raises(TypeError, match="or a function"):
        check_naming(3)  # type: ignore[arg-type]
    assert check_naming("path") == "path"


def test_names_a_tar_looks_at_the_path_only() -> None:
    """Queries do not count, commands do."""
    assert all(map(names_a_tar, ["x.tar", "s3://b/x.TAR.GZ?a=b.cbor", "pipe:curl h/x.tgz | cat"]))
    assert not any(map(names_a_tar, ["x.cbor", "http://h/get?file=x.tar", "pipe:make shards"]))
