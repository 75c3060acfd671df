"""Patterns: braces, globs, folders, lists, and what is wrong with them."""

import itertools
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from braceexpand import braceexpand
from fsspec.implementations.memory import MemoryFileSystem

from torchdata_wds.errors import ShardListError, ShardOpenError, WdsError
from torchdata_wds.storage import list_urls, open_shard
from torchdata_wds.storage.compression import SHARD_SUFFIXES
from torchdata_wds.storage.urls import expand_braces


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with shards, others, and a folder of shards."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.tar", "a.tar", "c.tgz", ".hidden.tar", "notes.txt", "x1.tar", "x.tar.partial"):
        (tmp_path / name).touch()
    (tmp_path / "deep" / "er.tar").mkdir(parents=True)
    (tmp_path / "deep" / "er.tar" / "d.tar").touch()
    (tmp_path / "deep" / "e.tar").touch()
    return tmp_path


@pytest.fixture
def memory() -> Iterator[None]:
    filesystem = fsspec.filesystem("memory")
    for name in ("b.tar", "a.tar", "notes.txt", "deep/d.tar", "x.tar.gz"):
        filesystem.pipe(f"/set/{name}", b"x")
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def listed(pattern: Any, **options: Any) -> list[str]:
    return list(list_urls(pattern, **options))


@pytest.mark.parametrize(
    ("pattern", "urls"),
    [
        ("t-{0..2}.tar", ["t-0.tar", "t-1.tar", "t-2.tar"]),
        ("t-{08..10}.tar", ["t-08.tar", "t-09.tar", "t-10.tar"]),
        ("t-{0..4..2}.tar", ["t-0.tar", "t-2.tar", "t-4.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("{a,b{0..1}}.tar", ["a.tar", "b0.tar", "b1.tar"]),
        ("x{,2}.tar", ["x.tar", "x2.tar"]),
        ("{c..a..-1}.tar", ["c.tar", "b.tar", "a.tar"]),
        ("{one}.tar", ["{one}.tar"]),
        ("s3://b/{0..1}.tar", ["s3://b/0.tar", "s3://b/1.tar"]),
        ("file:///a/{0..1}.tar", ["file:///a/0.tar", "file:///a/1.tar"]),
        ("a.tar::b-{0..1}.tar", ["a.tar", "b-0.tar", "b-1.tar"]),
        ("s3://b/a.tar::s3://b/b.tar", ["s3://b/a.tar", "s3://b/b.tar"]),
        ("simplecache::s3://b/{0..1}.tar", ["simplecache::s3://b/0.tar", "simplecache::s3://b/1.tar"]),
        ("zip://a.tar::s3://b/x.zip::c.tar", ["zip://a.tar::s3://b/x.zip", "c.tar"]),
        ("filecache::zip://a.tar::s3://b/x.zip", ["filecache::zip://a.tar::s3://b/x.zip"]),
        ("a.tar::simplecache::s3://b/x.tar", ["a.tar", "simplecache::s3://b/x.tar"]),
        ("http://[::1]:80/{a,b}.tar", ["http://[::1]:80/a.tar", "http://[::1]:80/b.tar"]),
        ("http://[::1]/a.tar::http://u@[fe80::1]/b.tar", ["http://[::1]/a.tar", "http://u@[fe80::1]/b.tar"]),
        ("https://h/{00..01}.tar?a=*&b={x}", ["https://h/00.tar?a=*&b={x}", "https://h/01.tar?a=*&b={x}"]),
        ("https://h/folder/", ["https://h/folder/"]),
        ("pipe:cat {a,b}.tar", ["pipe:cat a.tar", "pipe:cat b.tar"]),
        ("pipe:cat *.tar | awk '{print $1}'", ["pipe:cat *.tar | awk '{print $1}'"]),
        ("pipe:awk '{print $1, $2}' {0..1}", ["pipe:awk '{print $1, $2}' 0", "pipe:awk '{print $1, $2}' 1"]),
        ("pipe:cat ${A,B} ${HOME}/x}{", ["pipe:cat ${A,B} ${HOME}/x}{"]),
        ("pipe:cat {} {a} {a{0..1},c}", ["pipe:cat {} {a} a0", "pipe:cat {} {a} a1", "pipe:cat {} {a} c"]),
        ("pipe:perl -MA::B x", ["pipe:perl -MA::B x"]),
        ("pipe:cat a::pipe:cat b", ["pipe:cat a", "pipe:cat b"]),
        ("-", ["-"]),
        (["a.tar", ("b.tar", ["c.tar", "a.tar"])], ["a.tar", "b.tar", "c.tar", "a.tar"]),
        (Path("no/x.tar"), ["no/x.tar"]),
        (Path("x-{0..1}.tar"), ["x-0.tar", "x-1.tar"]),
        ("no-such.tar", ["no-such.tar"]),
        ("s3://b/x.tar?versionId=abc", ["s3://b/x.tar?versionId=abc"]),
    ],
)
def test_list_urls_expands(pattern: Any, urls: list[str]) -> None:
    """Braces, pairs of colons and lists become URLs in the order written, and what is no pattern stays."""
    assert listed(pattern) == urls


@pytest.mark.parametrize("start", ["", "no/", "s3://b/", "https://h/", "file:///no/", "~no-one/", "a:"])
def test_list_urls_asks_no_file_system_when_names_look_like_shards(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network disk each question is a round trip; only whether a text with braces is itself a file is asked."""
    asked: list[str] = []

    def stat(path: Any, **options: Any) -> Any:
        asked.append(str(path))
        return real(path, **options)

    real = os.stat
    monkeypatch.setattr(os, "stat", stat)
    names = [f"{start}x-{number}.tar.gz" for number in range(100)]
    assert listed(names) == listed(f"{start}x-{{0..99}}.tar.gz") == names
    assert len(asked) <= 1


def test_list_urls_gives_the_same_when_names_look_like_shards(folder: Path) -> None:
    """With a rule that matches nothing every name is resolved, which must make no difference."""
    (folder / "deep" / "x{0..1}.tar").touch()
    (folder / "z::a.tar").touch()
    starts = (
        "",
        "deep/",
        "./",
        "file:",
        "FILE://x/",
        "memory://",
        "s3://b/",
        "https://h/",
        "HTTP://h:8/",
        "gs://b:{,:}x/",
    )
    starts += ("{~,deep}/", "~/", "{s3,file}://", "a:", "a:{,:}b/", "${x}/", "pipe:cat ", "dir://x/", "s4://")
    ends = (
        "a.tar",
        "x{0..1}.tar",
        "x{0..1",
        "{a,b}",
        "*.tar",
        "x[1].tar",
        "z::a.tar",
        "{a,b}.tgz",
        "a.TAR",
        "{b..a}.tar",
    )
    ends += (
        "",
        "x?y=1.tar",
        "e.tar?v=1&w={0..1}",
        "{}",
        "{x,y}/",
        "a{0..}.tar",
        "a.txt",
        "x.tar\n",
        "~.tar",
        "$a.tar",
        "{x}.tar",
    )
    for pattern in [start + end for start in starts for end in ends]:
        results = []
        for rewrite in (None, {"no-such://": "x"}):
            try:
                results.append(listed(pattern, rewrite=rewrite))
            except WdsError as error:
                results.append([str(error)])
        assert results[0] == results[1], pattern


def test_ranges_of_numbers_expand_as_braceexpand_does() -> None:
    """Padding, order and steps: the usual pattern is expanded without that package."""
    ends = ("0", "00", "7", "07", "9", "10", "010", "99", "100", "-1", "-01")
    for first, last in itertools.product(ends, repeat=2):
        for pattern in (
            f"{{{first}..{last}}}",
            f"a-{{{first}..{last}}}.tar",
            f"{{{first}..{last}..2}}x",
            f"{{a,b}}{{{first}..{last}}}",
        ):
            if int(first) <= int(last):
                assert list(expand_braces(pattern)) == list(braceexpand(pattern, escape=False)), pattern


def test_list_urls_does_no_work_before_it_is_iterated() -> None:
    """Only the options are looked at by the call."""
    assert next(list_urls(["a.tar", "nothing-*.tar"])) == "a.tar"


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.tar", ["a.tar", "b.tar", "x1.tar"]),
        ("./[ab].tar", ["./a.tar", "./b.tar"]),
        ("?.tar", ["a.tar", "b.tar"]),
        ("**/*.tar", ["a.tar", "b.tar", "deep/e.tar", "deep/er.tar/d.tar", "x1.tar"]),
        ("{deep/*,[!a]}.tar", ["deep/e.tar", "b.tar"]),
        ("deep", ["deep/e.tar"]),
        ("deep/", ["deep/e.tar"]),
        (Path(), ["./a.tar", "./b.tar", "./c.tgz", "./x1.tar"]),
        ("./", ["./a.tar", "./b.tar", "./c.tgz", "./x1.tar"]),
        ("x[1].tar", ["x1.tar"]),
        ("*.txt", ["notes.txt"]),
        ("b.tar::*.tgz", ["b.tar", "c.tgz"]),
    ],
)
def test_list_urls_finds_local_shards(pattern: Any, names: list[str], folder: Path) -> None:
    """Globs and folders give files, sorted, hidden ones and folders left out."""
    assert listed(pattern) == names


@pytest.mark.parametrize("name", ["deep/er.tar", "deep/{er,e}.tar"])
def test_a_folder_with_the_name_of_a_shard_needs_its_slash(name: str, folder: Path) -> None:
    """Names that look like shards are not looked up; opening one that is a folder says what to write."""
    assert listed(name)[0] == listed(Path(name))[0] == "deep/er.tar"
    with pytest.raises(ShardOpenError, match=r"a folder with the name of a shard; .* list deep/er\.tar/"):
        open_shard("deep/er.tar")
    assert listed("deep/er.tar/") == ["deep/er.tar/d.tar"]


@pytest.mark.parametrize(
    "name", ["a{1}.tar", "a{0..1}.tar", "x[1].tar", "a::b.tar", "*.tar", "a?b=1.tar", "{}.tar", "a}.tar"]
)
def test_list_urls_takes_a_path_verbatim_when_it_exists(name: str, folder: Path) -> None:
    """A file that has exactly this name is meant, whatever its name looks like."""
    (folder / name).touch()
    assert listed(name) == listed(Path(name)) == [name]
    assert listed(str(folder / name)) == [str(folder / name)]


def test_list_urls_takes_an_expanded_path_verbatim_when_it_exists(folder: Path) -> None:
    """Brackets that are in the file name stay after braces are expanded."""
    (folder / "y[1].tar").touch()
    assert listed("{y,y}[1].tar") == ["y[1].tar", "y[1].tar"]


def test_list_urls_gives_file_urls_when_asked_by_file_url(folder: Path) -> None:
    """Globs and folders of a file: URL come back as file: URLs that open."""
    (folder / "a b%.tar").touch()
    urls = listed(f"file://{folder}/a*.tar")
    assert urls == [f"file://{folder}/a%20b%25.tar", f"file://{folder}/a.tar"]
    assert listed(f"file:{folder}/deep") == [f"file://{folder}/deep/e.tar"]
    for url in urls:
        open_shard(url).close()


def test_list_urls_knows_every_suffix_of_a_shard(tmp_path: Path) -> None:
    """A folder gives shards of every compression, in either case."""
    names = sorted([f"x{suffix}" for suffix in SHARD_SUFFIXES] + ["Y.TAR", "y.Tar.Gz"])
    for name in [*names, "x.zip", "tar", "x.tar.md5"]:
        (tmp_path / name).touch()
    assert listed(tmp_path) == [f"{tmp_path}/{name}" for name in names]


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("memory://set/*.tar", ["memory://set/a.tar", "memory://set/b.tar"]),
        ("memory:///set/*.tar", ["memory:///set/a.tar", "memory:///set/b.tar"]),
        ("memory://set/", ["memory://set/a.tar", "memory://set/b.tar", "memory://set/x.tar.gz"]),
        ("memory://*/deep/?.tar", ["memory://set/deep/d.tar"]),
        ("memory://set/**/d.tar", ["memory://set/deep/d.tar"]),
        ("memory://set/{a,x*}.tar*", ["memory://set/a.tar", "memory://set/x.tar.gz"]),
        ("memory://set/no.tar", ["memory://set/no.tar"]),
        ("simplecache::memory://set/*.tar", ["simplecache::memory://set/a.tar", "simplecache::memory://set/b.tar"]),
        ("simplecache::memory://set/deep/", ["simplecache::memory://set/deep/d.tar"]),
    ],
)
def test_list_urls_finds_shards_by_fsspec(pattern: str, names: list[str]) -> None:
    """Globs and folders of a store give whole URLs that open, sorted."""
    assert listed(pattern) == names
    for url in names if "no.tar" not in pattern else ():
        open_shard(url).close()


def test_list_urls_finds_shards_in_an_archive(tmp_path: Path) -> None:
    """A glob inside a zip file gives chained URLs that open."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for name in ("in/b.tar", "in/a.tar", "in/c.txt"):
            archive.writestr(name, b"x")
    urls = listed(f"zip://in/*.tar::file://{tmp_path}/x.zip")
    assert urls == [f"zip://in/{name}.tar::file://{tmp_path}/x.zip" for name in "ab"]
    assert listed(f"zip://in/::file://{tmp_path}/x.zip") == urls
    for url in urls:
        open_shard(url).close()


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("*.tgz", "working directory is"),
        ("no/folder/*.tar", "'no/folder' does not exist"),
        ("deep/er.tar/x*.tar", "holds 1 entries"),
        ("empty/", "the folder holds 1 files, none of them ends in .tar"),
        ("de*p", "matches 1 folders and no file"),
        ("/no-such-folder-x/*", "'/no-such-folder-x' does not exist"),
        ("memory://set/*.nothing", "no shard matches"),
        ("memory://no/such/", "not found"),
        ("s4://b/*.tar", "unknown scheme s4"),
        ("t-{0..2.tar", "unbalanced"),
        ("t-" + "{a," * 1100 + "}" * 1100, "nested too deeply"),
        ("t-0..2}.tar", "unbalanced"),
        ("t-{2..0}.tar", "runs backwards"),
        ("t-{c..a}.tar", "runs backwards"),
        ("t-{}.tar", "are empty"),
        ("t-{0..}.tar", "not a complete range"),
        ("t-{..3}.tar", "not a complete range"),
        ("t-{0...3}.tar", "not a complete range"),
        ("t-{0..b}.tar", "not a complete range"),
        ("https://h/{9..0}.tar?token=abc", r"token=\*\*\*: the range \{9\.\.0\} runs backwards"),
        ("a.tar::", "is empty"),
        ("::a.tar", "is empty"),
    ],
)
def test_list_urls_raises_when_a_pattern_is_wrong(pattern: str, said: str, folder: Path) -> None:
    """A pattern that gives nothing or cannot be understood is named, with a hint."""
    (folder / "c.tgz").unlink()
    (folder / "empty").mkdir()
    (folder / "empty" / "readme").touch()
    with pytest.raises(ShardListError, match=said):
        listed(pattern)


@pytest.mark.parametrize("pattern", ["a", "", ["t", "r"], list("train.tar"), ".", "/"])
def test_list_urls_raises_when_an_item_is_one_character(pattern: Any) -> None:
    """A str where a list belongs shows as items of one character, and the error says so."""
    with pytest.raises(ShardListError, match="instead of a list"):
        listed(pattern)


@pytest.mark.parametrize("pattern", [None, 3, b"x.tar", {"x.tar"}, {"a": "b"}, ["x.tar", None], iter(["x.tar"])])
def test_list_urls_raises_when_an_item_is_no_pattern(pattern: Any) -> None:
    """Anything but str, path and lists of them is named by its type."""
    item = pattern[1] if isinstance(pattern, list) else pattern
    with pytest.raises(ShardListError, match=f"not {type(item).__name__}"):
        listed(pattern)


def test_list_urls_gives_options_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A glob is asked for with the options of its protocol, and a refusal shows no secret."""

    class Locked(MemoryFileSystem):  # type: ignore[misc]
        protocol = "locked"
        cachable = False

        def glob(self, path: str, **options: Any) -> Any:
            raise PermissionError(f"password={self.storage_options['password']}")

    fsspec.register_implementation("locked", Locked, clobber=True)
    with pytest.raises(ShardListError, match=r"PermissionError: password=\*\*\*") as caught:
        listed("locked://b/*.tar", storage_options={"locked": {"password": "abc"}})
    assert "=abc" not in "".join(traceback.format_exception(caught.value))


def test_open_shard_names_list_shards_when_a_listed_brace_was_no_pattern() -> None:
    """A brace of one word is passed on, and opening it says what may be wrong."""
    with pytest.raises(ShardOpenError, match="list_shards"):
        open_shard(listed("no-such-{one}.tar")[0])


@pytest.mark.parametrize("pattern", [[], [[]], ["a.tar", ()]])
def test_list_urls_raises_when_a_list_is_empty(pattern: object) -> None:
    """An empty list is a pattern that matches nothing."""
    with pytest.raises(ShardListError, match="is empty"):
        list(list_urls(pattern))


@pytest.mark.parametrize(
    ("pattern", "urls"),
    [
        ("s3://${bucket}/${split}-{0..1}.tar", ["s3://data/train-0.tar", "s3://data/train-1.tar"]),
        ("${root}/x.tar", ["s3://data/in/x.tar"]),
        ("${many}", ["a.tar", "b.tar", "s3://data/c-0.tar", "s3://data/c-1.tar"]),
        ("https://host/${split}.tar", ["https://host/train.tar"]),
        ("pipe:cat ${HOME}/${split}.tar", ["pipe:cat ${HOME}/train.tar"]),
        (Path("${split}/x.tar"), ["train/x.tar"]),
        ("$split-{split}-${x y}.tar", ["$split-{split}-${x y}.tar"]),
    ],
)
def test_list_urls_puts_in_variables(pattern: Any, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``${name}`` is WDS_name, whose value may hold patterns and variables; a shell keeps its own."""
    values = {
        "bucket": "data",
        "split": "train",
        "root": "s3://${bucket}/in",
        "many": "{a,b}.tar::s3://${bucket}/c-{0..1}.tar",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"WDS_{name}", value)
    monkeypatch.delenv("WDS_HOME", raising=False)
    assert listed(pattern, variables=True) == urls


def test_list_urls_raises_when_a_variable_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is not set is named, as are those that never end."""
    with pytest.raises(ShardListError, match=r"\$\{no_such\} stands for the environment variable WDS_no_such, which"):
        listed("s3://b/${no_such}.tar", variables=True)
    monkeypatch.setenv("WDS_a", "${b}")
    monkeypatch.setenv("WDS_b", "${a}x")
    with pytest.raises(ShardListError, match="the variables in it stand for each other"):
        listed("${a}.tar", variables=True)


def test_list_urls_leaves_variables_when_it_is_not_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's pattern reads no variable, and a file of exactly that name is meant."""
    monkeypatch.setenv("WDS_x", "secret")
    assert listed("s3://b/${x}.tar") == ["s3://b/${x}.tar"]
    (folder / "${x}.tar").touch()
    assert listed("${x}.tar", variables=True) == ["${x}.tar"]
