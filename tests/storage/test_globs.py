"""Globs of local files: ``**``, links, and homes."""

import glob
import itertools
import os
from pathlib import Path

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import tar_bytes
from torchdata_wds import ShardWriter, TarWriter
from torchdata_wds.errors import ShardListError, ShardOpenError
from torchdata_wds.storage import globs, list_urls, open_shard
from torchdata_wds.storage.globs import find_matches


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shards in folders of several depths, which is the working directory too."""
    for name in ("x.tar", "a/y.tar", "a/b/z.tar", "a/b/c/z.tar", ".h/n.tar", "a/.h.tar", "[a]/y.tar"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1024))
    monkeypatch.chdir(tmp_path)
    globs._warned.clear()
    return tmp_path


def files(paths: list[str]) -> set[str]:
    return {path for path in paths if Path(path).is_file() and not path.endswith("/")}


def test_find_matches_equals_glob_when_there_are_no_links(tree: Path) -> None:
    """For every pattern of three parts; what glob gives twice comes once."""
    parts = ("**", "*", "a", "b", "*.tar", "z.tar", "**.tar", ".h", "[[]a]", "?", ".", "")
    patterns = ["/".join(chosen) for count in (1, 2, 3) for chosen in itertools.product(parts, repeat=count)]
    for pattern in patterns:
        if pattern.startswith("/") or "//" in pattern or not glob.has_magic(pattern):
            continue
        expected = files(glob.glob(pattern, recursive=True))  # noqa: PTH207 - the model
        assert files(find_matches(pattern)) == expected, pattern
        found = find_matches(pattern)
        assert globs.find_files(pattern) == (globs.files_among(found), len(found) - len(globs.files_among(found)))
    assert find_matches("./**/z.tar") == ["./a/b/c/z.tar", "./a/b/z.tar"]
    assert find_matches(f"{tree}/**/x.tar") == [f"{tree}/x.tar"]


@pytest.mark.parametrize(
    ("name", "target"),
    [("latest", "a"), ("a/up", ".."), ("a/b/self", "."), ("a/b/c/top", "../../.."), ("a/lost", "no")],
)
def test_list_urls_lists_each_shard_once_when_there_are_links_to_folders(
    tree: Path, name: str, target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in a circle; with one warning that names the link, none for a link to nothing."""
    expected = list(list_urls("**/*.tar"))
    Path(name).symlink_to(target)
    for _ in range(2):
        assert list(list_urls("**/*.tar")) == expected
    assert len(caplog.records) == (target != "no")
    assert (f"such as {name}/" in caplog.text) is (target != "no")


def test_list_urls_ends_when_links_lead_in_several_circles(tree: Path) -> None:
    """Whose paths would be without number."""
    for name, target in (("a/up", ".."), ("a/b/top", "../.."), ("l", "a"), ("a/b/c/l", "../..")):
        Path(name).symlink_to(target)
    assert len(list(list_urls("**/*.tar"))) == 5
    assert len(list(list_urls("**/b/**/*.tar"))) == 2


def test_list_urls_follows_links_when_the_pattern_names_them(tree: Path) -> None:
    """By their name or by a star; links to files are files."""
    Path("latest").symlink_to("a")
    Path("link.tar").symlink_to("a/y.tar")
    assert list(list_urls("latest/*.tar")) == ["latest/y.tar"]
    assert list(list_urls("latest/**/y.tar")) == ["latest/y.tar"]
    assert list(list_urls("l*/*.tar")) == ["latest/y.tar"]
    assert "link.tar" in list(list_urls("**/*.tar"))


def test_list_urls_warns_when_a_folder_cannot_be_read(
    tree: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its shards would be missing without a word."""
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).rstrip("/") == "a":
            raise PermissionError
        return real(path)

    monkeypatch.setattr(globs.os, "scandir", scandir)
    list(list_urls("**/x.tar"))
    assert "such as a/" in caplog.text


def test_files_among_equals_isdir_when_folders_match_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, links to them, circular and lost links: one listing of a folder says what asking about each would."""
    for number in range(20):
        (tree / "a" / f"{number}.tar").touch()
    for name, target in (("up.tar", ".."), ("lost.tar", "no"), ("loop.tar", "loop.tar"), ("link.tar", "y.tar")):
        (tree / "a" / name).symlink_to(target)
    (tree / "a" / "folder.tar").mkdir()
    matches = {
        pattern: find_matches(pattern) for pattern in ("a/*", f"{tree}/a/*.tar", "*", "**/*", "**", "a/../a/*", "/*")
    }
    expected = {pattern: [found for found in matches[pattern] if not os.path.isdir(found)] for pattern in matches}  # noqa: PTH112
    asked: list[str] = []
    monkeypatch.setattr(os.path, "isdir", lambda path: asked.append(path) or Path(path).is_dir())
    assert {pattern: globs.files_among(found) for pattern, found in matches.items()} == expected
    assert {pattern: globs.find_files(pattern)[0] for pattern in matches} == expected
    assert not [path for path in asked if path.startswith("a/") and path.endswith("0.tar")]


# --------------------------------------------------------------------------------------------------------------- homes
def test_a_home_is_put_in_wherever_a_local_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By writers, lists, loaders, indexes, rules and caches of samples; what is listed are the paths."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with ShardWriter("~/x-%d.tar", encoder=False, index=True) as writer:
        writer.write({"__key__": "a", "txt": b"1"})
    with TarWriter("~/y.tar", encoder=False) as tar:
        tar.write({"__key__": "b", "txt": b"2"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".wds-index", "x-0.tar", "y.tar"]
    for pattern in ("~/*.tar", "~/{x-0,y}.tar", "~/", ["~/x-0.tar", Path("~/y.tar")]):
        found = [os.path.normpath(url) for url in list_urls(pattern)]
        assert found == [f"{tmp_path}/x-0.tar", f"{tmp_path}/y.tar"], pattern
    pipe = IterableWrapper(["~/x-0.tar"]).split_shards(index=True).load_wds_shards().group_by_key()
    assert [sample["__key__"] for sample in pipe.cache_samples("~/samples.db")] == ["a"]
    assert (tmp_path / "samples.db").exists()
    elsewhere = IterableWrapper(["s3://b/*.tar"]).list_shards(rewrite={"s3://b": "~"})
    assert list(elsewhere) == ["s3://b/x-0.tar", "s3://b/y.tar"]


def test_a_path_is_taken_verbatim_when_it_exists_with_its_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As any other pattern that is the name of a file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~").mkdir()
    (tmp_path / "~" / "x.tar").write_bytes(tar_bytes([("a.txt", b"1")]))
    assert list(list_urls("~/x.tar")) == ["~/x.tar"]
    with open_shard("~/x.tar") as stream:
        assert stream.read(5) == b"a.txt"
    (tmp_path / "~x.tar").write_bytes(bytes(1024))
    assert list(list_urls("*.tar")) == ["~x.tar"]


def test_an_error_names_the_user_when_there_is_none_of_a_path() -> None:
    """Which is then a name of a file, and none is there."""
    with pytest.raises(ShardOpenError, match="no user 'nobody-of-that-name'"):
        open_shard("~nobody-of-that-name/x.tar")
    with pytest.raises(ShardListError, match="no shard matches"):
        list(list_urls("~nobody-of-that-name/*.tar"))
