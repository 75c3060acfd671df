"""Names of outputs: one for each input, and none that would be lost under another."""

from pathlib import Path

import pytest

from torchdata_wds.cli.map.shard_tasks import is_target_pattern, name_targets
from torchdata_wds.errors import ShardListError

URLS = ["a/x-0.tar", "file:///b/x%201.TAR.GZ", "https://host/d/v1.2-x.tgz?token=abc", "s3://bucket/y", "/c/z.tar.bz2"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("out/", ["out/x-0.tar", "out/x 1.TAR.GZ", "out/v1.2-x.tgz", "out/y", "out/z.tar.bz2"]),
        (
            "s3://b/o/",
            ["s3://b/o/x-0.tar", "s3://b/o/x 1.TAR.GZ", "s3://b/o/v1.2-x.tgz", "s3://b/o/y", "s3://b/o/z.tar.bz2"],
        ),
        ("/", ["/x-0.tar", "/x 1.TAR.GZ", "/v1.2-x.tgz", "/y", "/z.tar.bz2"]),
        ("o/{name}.tar", ["o/x-0.tar", "o/x 1.tar", "o/v1.2-x.tar", "o/y.tar", "o/z.tar"]),
        ("{shard}/", ["0/x-0.tar", "1/x 1.TAR.GZ", "2/v1.2-x.tgz", "3/y", "4/z.tar.bz2"]),
        ("{shard}.{name}", ["0.x-0", "1.x 1", "2.v1.2-x", "3.y", "4.z"]),
        ("{shard:03d}/{shard:2}", ["000/ 0", "001/ 1", "002/ 2", "003/ 3", "004/ 4"]),
    ],
)
def test_name_targets_fills_the_pattern(pattern: str, expected: list[str]) -> None:
    """With base names, without the suffixes of shards, queries and folders; or with numbers."""
    assert name_targets(URLS, pattern) == expected


def test_name_targets_takes_an_existing_folder(tmp_path: Path) -> None:
    """As cp does, also without a slash."""
    assert name_targets(["a/x.tar"], str(tmp_path)) == [f"{tmp_path}/x.tar"]
    assert name_targets(["a/x.tar"], f"file:{tmp_path}") == [f"file:{tmp_path}/x.tar"]
    assert name_targets(["a/x.tar"], f"{tmp_path}/new") == [f"{tmp_path}/new"]
    (tmp_path / "{odd}").mkdir()
    assert name_targets(["a/x.tar"], f"{tmp_path}/{{odd}}") == [f"{tmp_path}/{{odd}}/x.tar"]


def test_name_targets_may_replace_inputs_in_place_when_asked() -> None:
    """Each its own, and never another's."""
    assert name_targets(["a/x.tar", "a/y.tar"], "a/", in_place=True) == ["a/x.tar", "a/y.tar"]
    with pytest.raises(ShardListError, match="would replace the input"):
        name_targets(["x-1.tar", "x-0.tar"], "x-{shard}.tar", in_place=True)


def test_is_target_pattern_sees_folders_and_braces(tmp_path: Path) -> None:
    """Commands and standard output take braces for their own."""
    patterns = ("out/", str(tmp_path), f"file:{tmp_path}", "s3://b/o/", "{name}", "a{shard:06d}b", "{unknown}", "{}")
    assert all(map(is_target_pattern, patterns))
    assert not any(map(is_target_pattern, ("x.tar", "-", "", "a}b{", "pipe:xargs -I{} cp {} out/")))


def test_name_targets_takes_base_names_as_they_are() -> None:
    """A brace in a name is no place, and a name that is all suffix stays."""
    assert name_targets(["a/{shard}.tar", "a/.tar"], "o/{name}.x") == ["o/{shard}.x", "o/.tar.x"]


@pytest.mark.parametrize(
    ("urls", "pattern", "message"),
    [
        (["a/x.tar", "b/x.tar"], "o/", r"inputs a/x\.tar and b/x\.tar would both become o/x\.tar"),
        (["a/x.tar", "a/x.tar"], "o/{name}.tar", "would both become"),
        (["a/x.tar", "a/x.tar.gz"], "o/{name}.tar", "would both become"),
        (["a/x.tar", "b/y.tar"], "o/z.tar", r"would both become o/z\.tar; an output's name takes {name}"),
        (["a/x.tar", "b/x.tar"], "memory://o/", "would both become"),
        (["a/x.tar"], "a/", r"output a/x\.tar of input a/x\.tar would replace the input a/x\.tar"),
        (["x-0.tar", "x-1.tar"], "./x-{shard}.tar", "would replace the input"),
        (
            ["x-1.tar", "x-0.tar"],
            "x-{shard}.tar",
            r"output x-0\.tar of input x-1\.tar would replace the input x-0\.tar",
        ),
        (["s3://b/x.tar"], "s3://b/", "would replace the input"),
        (["pipe:cat x.tar"], "o/", r"input pipe:cat x\.tar has no base name .*{shard:06d}"),
        (["-"], "o/{name}.tar", "no base name"),
        (["a/.."], "o/", "no base name"),
        (["https://host/?x=1"], "o/", "no base name"),
        (["x.tar"], "o/{key}.tar", "unknown place {key}: there are {name}"),
        (["x.tar"], "o/{name:06d}.tar", "unknown place"),
        (["x.tar"], "o/{name!r}.tar", "unknown place"),
        (["x.tar"], "o/{}.tar", "unknown place {}"),
        (["x.tar"], "o/{0..3}.tar", r"unknown place {0\.\.3}"),
        (["x.tar"], "o/{key}/", "unknown place {key}"),
        (["x.tar"], "o/{shard:09999999999999999999d}", "unknown place"),
        (["x.tar"], "-", "outputs are files"),
        (["x.tar"], "pipe:cat > {name}", "outputs are files"),
        (["x.tar"], "", "outputs are files"),
    ],
)
def test_name_targets_refuses_names_that_lose_something(urls: list[str], pattern: str, message: str) -> None:
    """Before anything is done; the error names both."""
    with pytest.raises(ShardListError, match=message):
        name_targets(urls, pattern)


def test_name_targets_sees_one_file_under_two_names(tmp_path: Path) -> None:
    """Links of folders lead to the same file."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ShardListError, match="would replace the input"):
        name_targets([str(tmp_path / "real" / "x.tar")], f"{tmp_path}/link/")


def test_name_targets_masks_secrets() -> None:
    """Also where it complains."""
    with pytest.raises(ShardListError) as caught:
        name_targets(["https://host/x.tar?token=abc", "https://host/x.tar?token=def"], "o/")
    assert "abc" not in str(caught.value)
    assert "def" not in str(caught.value)
