"""Rules that send URLs elsewhere: where they hold, what they never do, and what is said of wrong ones."""

import copy
import gzip
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.shards import text_keys, write_text_shards
from torchdata_wds.errors import ShardFormatError, ShardListError, ShardOpenError, UnsafeDataError
from torchdata_wds.storage import (
    RewriteRules,
    StorageOptions,
    can_reopen,
    list_targets,
    list_urls,
    open_shard,
    open_target,
    remove_target,
)

NAMES = [f"shard-{index:06d}.tar" for index in range(3)]


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only the rules of the test hold."""
    for name in ("WDS_REWRITE", "GOPEN_REWRITE", "WDS_SECURE"):
        monkeypatch.delenv(name, raising=False)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three text shards in ``b/``."""
    write_text_shards(tmp_path / "b", (1, 2, 1))
    return tmp_path


def read(url: str, **options: Any) -> bytes:
    with open_shard(url, **options) as stream:
        return stream.read()


def listed(pattern: Any, **options: Any) -> list[str]:
    return list(list_urls(pattern, **options))


# -------------------------------------------------------------------------------------------------------------- rules
@pytest.mark.parametrize(
    ("rules", "url", "place"),
    [
        ("gs://=/data/", "gs://b/x.tar", "/data/b/x.tar"),
        ("gs://=/data/", "s3://b/gs://", None),
        ("s3://b=first;s3://=second/", "s3://b/x.tar", "first/x.tar"),
        ("s3://b=first;s3://=second/", "s3://c/x.tar", "second/c/x.tar"),
        ("s3://keep/=s3://keep/;s3://=elsewhere/", "s3://keep/x.tar", "s3://keep/x.tar"),
        ("a|b=x", "cb", None),
        ("a|b=x", "b/b.tar", "x/b.tar"),
        (r"s3://([^/]+)/(.*)\.tar=https://\1.host/\2.tgz?a=1", "s3://b/x/y.tar", "https://b.host/x/y.tgz?a=1"),
        ("gs://=pipe:ssh proxy gsutil cat ", "gs://b/x.tar", "pipe:ssh proxy gsutil cat b/x.tar"),
        (" ;\n gs://=a/;; s3://=b/;", "s3://x.tar", "b/x.tar"),
        ("file://=", "file:///x.tar", "/x.tar"),
        ({"s3://b/x=1;": "y=2;"}, "s3://b/x=1;.tar", "y=2;.tar"),
        (None, "s3://b", None),
        ("", "s3://b", None),
        ({}, "s3://b", None),
    ],
)
def test_rules_apply_the_first_that_matches(rules: Any, url: str, place: str | None) -> None:
    """A rule is matched at the beginning, replaces what it matches, and no other comes after it."""
    assert RewriteRules(rules).apply(url) == place
    assert RewriteRules(RewriteRules(rules)).apply(url) == place


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("gs://", "'gs://' has no '=': write regex=replacement"),
        ("a=b;gs:", "'gs:' has no '='"),
        ("=/data", "'=/data' has no regex before its '='"),
        ("(=x", "the regex of rewriting rule '(=x', which is everything before its first '=', is wrong"),
        ("(?P<a>=x)=y", r"Write \x3d for a '=' and \x3b for a ';' in it, or pass rewrite={regex: replacement}"),
        (r"a=\1", r"the replacement of rewriting rule 'a=\\1' is wrong: invalid group reference 1"),
        (r"a=\g<b>", "is wrong: unknown group name 'b'"),
        ({"*": "x"}, "the regex of rewriting rule '*=x'"),
        ("[=https://host/?token=abc", "https://host/?token=***"),
    ],
)
def test_rules_raise_when_one_is_wrong(rules: Any, said: str) -> None:
    """The rule is named, without what is secret in it."""
    with pytest.raises(ValueError, match="rewriting rule") as caught:
        RewriteRules(rules)
    assert said in str(caught.value)


@pytest.mark.parametrize("rules", [3, ["a=b"], b"a=b", {"a": 1}, {1: "a"}, {"a": b"b"}])
def test_rules_raise_when_they_are_no_text(rules: Any) -> None:
    """The constructor of whatever takes them says what they must be."""
    for use in (RewriteRules, IterableWrapper([]).list_shards, StorageOptions):
        with pytest.raises(TypeError, match=r"rewrite must be \"regex=replacement"):
            use(rules) if use is RewriteRules else use(rewrite=rules)


def test_rules_travel_and_hide_secrets() -> None:
    """They are pickled and copied with the options that hold them, and printed masked."""
    rules = RewriteRules({"a": "b", "s3://": "pipe:curl -H 'Authorization: abc' "})
    options = StorageOptions({"s3": {"key": "k"}}, rewrite=rules)
    for same in (pickle.loads(pickle.dumps(options)), copy.deepcopy(options), StorageOptions(options)):
        assert (same.rewrite, same) == (rules, options)
    assert StorageOptions(options, rewrite="c=d").rewrite == RewriteRules("c=d")
    assert hash(rules) == hash(RewriteRules(rules))
    assert bool(rules)
    assert not RewriteRules()
    for text in (repr(rules), repr(options)):
        assert "abc" not in text
        assert "Authorization: ***" in text


# --------------------------------------------------------------------------------------------- where they are applied
@pytest.mark.parametrize("variable", ["WDS_REWRITE", "GOPEN_REWRITE"])
def test_open_shard_opens_elsewhere_when_a_variable_says_so(
    variable: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable is read at each call."""
    monkeypatch.setenv(variable, f"gs://={folder}/")
    assert read(f"gs://b/{NAMES[0]}") == (folder / "b" / NAMES[0]).read_bytes()
    assert read(f"gs://b/{NAMES[0]}", offset=512) == (folder / "b" / NAMES[0]).read_bytes()[512:]
    monkeypatch.setenv(variable, "gs://=/no/such/")
    with pytest.raises(ShardOpenError, match=r"/no/such/b/.*where a rewriting rule looks for shard gs://b/") as caught:
        open_shard(f"gs://b/{NAMES[0]}")
    assert caught.value.shard == f"gs://b/{NAMES[0]}"


def test_rules_are_tried_in_their_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the argument's, then WDS_REWRITE's, then GOPEN_REWRITE's, and one only."""
    for name in "xyz":
        (folder / name).write_bytes(name.encode() * 1024)
    monkeypatch.setenv("GOPEN_REWRITE", f"a=/no/;b=/no/;c={folder}/z;{folder}=/no")
    monkeypatch.setenv("WDS_REWRITE", f"a=/no/;b={folder}/y")
    assert {read(url, rewrite=f"a={folder}/x")[:1] for url in "abc"} == {b"x", b"y", b"z"}


def test_open_shard_applies_rules_once() -> None:
    """A rule whose result it matches again is not applied to that: a mirror may have the same scheme."""
    fsspec.filesystem("memory").pipe("/mirror/b/x.tar", bytes(1024))
    rewrite = "memory://=memory://mirror/"
    assert read("memory://b/x.tar", rewrite=rewrite) == bytes(1024)
    assert listed("memory://b/*.tar", rewrite=rewrite) == ["memory://b/x.tar"]


def test_open_shard_names_both_when_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the middle tells the name as well as the place."""
    from torchdata_wds.storage import is_decompressed

    fsspec.filesystem("memory").pipe("/m/x.tar", gzip.compress(bytes(1000))[:-9])
    with open_shard("s3://b/x.tar", rewrite="s3://b=memory://m") as stream:
        assert stream.read(1000) == bytes(1000)
        for _ in range(2):
            with pytest.raises(ShardFormatError, match=r"memory://m/x.tar is cut.*looks for shard s3://b/x.tar"):
                stream.read(1)
        assert is_decompressed(stream)


def test_can_reopen_looks_where_the_rules_lead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command in place of a store gives its output once."""
    assert not can_reopen("s3://b/x.tar", storage_options=StorageOptions(rewrite="s3://=pipe:cat "))
    assert can_reopen("s3://b/x.tar")
    monkeypatch.setenv("WDS_REWRITE", "s3://=pipe:cat ")
    assert not can_reopen("s3://b/x.tar")


def test_targets_are_written_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing, listing and removing follow the rules, and errors name both."""
    monkeypatch.setenv("WDS_REWRITE", f"gs://b={tmp_path}")
    target = open_target("gs://b/x.tar")
    target.write(b"x")
    target.commit()
    assert (tmp_path / "x.tar").read_bytes() == b"x"
    assert list_targets("gs://b") == ["x.tar"]
    with pytest.raises(ShardOpenError, match=r"already exists.*where a rewriting rule puts shard gs://b/x.tar"):
        open_target("gs://b/x.tar")
    remove_target("gs://b/x.tar")
    assert list_targets("gs://b") == []


# ------------------------------------------------------------------------------------------------------------ listing
@pytest.mark.parametrize("pattern", ["gs://b/*.tar", "gs://b/", "gs://b", "gs://b/shard-{000000..000002}.tar"])
def test_list_urls_keeps_the_names_asked_for(pattern: str, folder: Path) -> None:
    """What is found elsewhere has the name under which it was looked for, and opens by the same rules."""
    rewrite = f"gs://={folder}/"
    urls = listed(pattern, rewrite=rewrite)
    assert urls == [f"gs://b/{name}" for name in NAMES]
    for url in urls:
        assert read(url, rewrite=rewrite) == (folder / url.removeprefix("gs://")).read_bytes()


def test_list_urls_keeps_names_when_they_are_odd(folder: Path) -> None:
    """A path with marks of patterns is taken as it is, and file: URLs are quoted."""
    (folder / "b" / "x[1] y.tar").touch()
    assert listed("gs://b/x[1] y.tar", rewrite=f"gs://={folder}/") == ["gs://b/x[1] y.tar"]
    (url,) = listed("gs://b/x*.tar", rewrite=f"gs://=file://{folder}/")
    assert url == "gs://b/x%5B1%5D%20y.tar"
    assert read(url, rewrite=f"gs://=file://{folder}/") == b""


def test_list_urls_gives_the_place_when_the_name_cannot_be_kept(folder: Path) -> None:
    """A rule that replaces the pattern itself leads to places that no rule changes again, or it is an error."""
    rules = {r"set-one/.*": f"{folder}/b/*.tar"}
    assert listed("set-one/all", rewrite=rules) == [f"{folder}/b/{name}" for name in NAMES]
    rules = {r"set-one/.*": f"{folder}/b/*.tar", f"{folder}/": "/other/"}
    with pytest.raises(ShardListError, match="Make the rule match only the part before the pattern"):
        listed("set-one/all", rewrite=rules)


def test_list_urls_raises_when_nothing_is_found_elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place and the pattern are both named; a malformed variable is named by its name."""
    with pytest.raises(ShardListError, match=rf"no shard matches {folder}/c/.*looks for shard gs://c/"):
        listed("gs://c/*.tar", rewrite=f"gs://={folder}/")
    monkeypatch.setenv("WDS_REWRITE", "gs")
    with pytest.raises(ShardListError, match=r"cannot list gs://c/x.tar while WDS_REWRITE is wrong: .*no '='"):
        listed("gs://c/x.tar")
    with pytest.raises(ShardOpenError, match=r"cannot open shard gs://c/x.tar while WDS_REWRITE is wrong"):
        open_shard("gs://c/x.tar")


def test_list_shards_and_samples_keep_the_names_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples say where they are from in the user's words, with rules of the environment and of arguments."""
    monkeypatch.setenv("WDS_REWRITE", f"gs://={folder}/")
    samples = list(IterableWrapper(["gs://b/*.tar"]).list_shards().load_wds_shards().group_by_key())
    assert [sample["__key__"] for sample in samples] == text_keys((1, 2, 1))
    assert {sample["__url__"] for sample in samples} == {f"gs://b/{name}" for name in NAMES}
    monkeypatch.delenv("WDS_REWRITE")
    lister = IterableWrapper(["gs://b/*.tar"]).list_shards(rewrite=f"gs://={folder}/")
    assert list(pickle.loads(pickle.dumps(lister))) == [f"gs://b/{name}" for name in NAMES]


# ----------------------------------------------------------------------------------------------------------- commands
def test_open_shard_runs_a_command_when_a_rule_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule is the user's own, and may make commands, except under WDS_SECURE=1; a list of braces works."""
    rewrite = f"gs://=pipe:cat {folder}/"
    urls = listed("gs://b/shard-{000000..000002}.tar", rewrite=rewrite)
    assert [read(url, rewrite=rewrite) for url in urls] == [(folder / "b" / name).read_bytes() for name in NAMES]
    with pytest.raises(ShardListError, match="makes a command of it; write braces"):
        listed("gs://b/*.tar", rewrite=rewrite)
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match="WDS_SECURE=1 forbids"):
        open_shard(urls[0], rewrite=rewrite)


@pytest.mark.parametrize(
    "url",
    [f"gs://{rest}" for rest in ("x;touch bad", "$(touch bad)", "x`touch bad`", "x&touch", "x y", "'x", "x\ny", "-rf")]
    + [f"gs://{rest}" for rest in ("~/x", "x>bad", "x|bad", '"x"', "x\\y", "x#y", "{x,y}", "x*", "x?", "[x]")],
)
def test_rules_refuse_urls_that_a_shell_would_run(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is the user's, but the URL may be a stranger's: it stays one word of the command."""
    monkeypatch.chdir(tmp_path)
    for rules in ("gs://=pipe:cat ", "gs://(.*)=pipe:cat '\\1'", "(?s)gs://(.*)=pipe:cat \\1"):
        with pytest.raises(UnsafeDataError, match="would become part of a command by a rewriting rule"):
            RewriteRules(rules).apply(url) or pytest.fail("nothing refused")
    assert not list(tmp_path.iterdir())


def test_rules_leave_commands_of_the_program_alone() -> None:
    """A pipe: URL is a command already, and a rule may change it."""
    rules = RewriteRules("pipe:gsutil=pipe:ssh host gsutil")
    assert rules.apply("pipe:gsutil cat x | cat; true") == "pipe:ssh host gsutil cat x | cat; true"
    assert RewriteRules("gs://b=pipe:cat /x").apply("gs://b-1/x.tar") == "pipe:cat /x-1/x.tar"


@pytest.mark.parametrize("rules", [{"gs://": ""}, {"gs://(.*)": "\\1"}, {"gs://p": "p"}, {"(?i)gs://": ""}])
def test_rules_refuse_urls_that_bring_a_command_of_their_own(rules: dict[str, str]) -> None:
    """A rule that only takes the scheme away makes no command of what a stranger wrote behind it."""
    for url in ("gs://pipe:reboot", "gs://PIPE:reboot" if "gs://p" not in rules else "gs://pipe:x"):
        with pytest.raises(UnsafeDataError, match="is a command itself, without its scheme"):
            RewriteRules(rules).apply(url)
    assert RewriteRules(rules).apply("gs://path/x.tar") == "path/x.tar"


def test_load_dataset_reads_elsewhere_and_refuses_commands_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset file must not have commands; what the user's rules make of its URLs is the user's."""
    spec = folder / "set.json"
    spec.write_text('{"dataset": [{"shards": "gs://b/shard-{000000..000002}.tar"}]}')
    monkeypatch.setenv("WDS_REWRITE", f"gs://=pipe:cat {folder}/")
    assert len(list(torchdata_wds.load_dataset(spec))) == 4
    spec.write_text('{"dataset": [{"shards": "pipe:cat x"}]}')
    with pytest.raises(UnsafeDataError, match="which no dataset file may do unasked"):
        torchdata_wds.load_dataset(spec)
