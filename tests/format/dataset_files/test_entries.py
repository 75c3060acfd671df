"""What a dataset file may not say: mistakes, which are named with their place, and what only a trusted file may do."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kits.servers import serve_folder
from tests.kits.shards import text_samples, write_tar
from torchdata_wds import SpecError, UnsafeDataError, load_dataset
from torchdata_wds.format.dataset_files.reading import folder_of, join_url, parse_spec


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with one shard x.tar."""
    write_tar(tmp_path / "x.tar", text_samples("x", 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WDS_SECURE", raising=False)
    return tmp_path


def save(content: Any, name: str = "spec.json") -> str:
    """Writes a file, in JSON unless it is a str."""
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def entry(**keys: Any) -> dict[str, Any]:
    return {"dataset": [{"shards": "x.tar"}, {"shards": "x.tar", **keys}]}


def source(**keys: Any) -> dict[str, Any]:
    return {"datasets": [{"shards": "x.tar"}, {"shards": "x.tar", **keys}]}


def wids(shard: Any = None, **keys: Any) -> dict[str, Any]:
    return {"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 2}, shard or {"url": "x.tar"}], **keys}


def transform(sample: dict[str, Any], *, scale: float = 1) -> dict[str, Any]:
    return sample


WRONG: list[tuple[Any, str]] = [
    # what the file is
    ([], "is not a dataset file"),
    ({}, "is not a dataset file"),
    ({"shards": "x.tar"}, "is not a dataset file.*found {'shards': 'x.tar'}"),
    ("", "is not JSON"),
    ("dataset: []", "is not JSON"),
    ("{", "is not JSON"),
    ("null", "is not a dataset file"),
    ('{"dataset": [{"shards": "x.tar", "shards": "y.tar"}]}', "the key 'shards' twice"),
    ("[" * 100_000, "nested too deeply"),
    # dataset
    ({"dataset": []}, "dataset: expected a list that is not empty, found []"),
    ({"dataset": "x.tar"}, "dataset: expected a list that is not empty, found 'x.tar'"),
    ({"dataset": ["x.tar"]}, r"dataset\[0\]: expected a mapping"),
    ({"dataset": [{}]}, r"dataset\[0\]: has no shards"),
    ({"dataset": [{"shards": "x.tar"}], "prefix": "s3://"}, "unknown key 'prefix'; known are dataset"),
    ({"dataset": [{"shards": "x.tar"}], "datasets": []}, "unknown key 'datasets'"),
    (entry(shards=5), r"dataset\[1\].shards: expected text, found 5"),
    (entry(shards=None), r"dataset\[1\].shards: expected text, found None"),
    (entry(shards=[]), r"dataset\[1\].shards: is an empty list"),
    (entry(shards=[["x.tar"]]), r"dataset\[1\].shards: expected text, found \['x.tar'\]"),
    (entry(shards=["x.tar", ""]), r"dataset\[1\].shards: holds an empty text"),
    (entry(shards="x-{0..99999999}.tar"), r"dataset\[1\].shards: .*more than 10,000,000 shards"),
    (entry(shards="x-{0..9999}{0..9999}.tar"), r"dataset\[1\].shards: .*more than 10,000,000 shards"),
    (entry(shards="http://h/x-{0..%s}.tar" % ("9" * 5000)), r"dataset\[1\].shards: .*more than 10,000,000 shards"),
    (source(shards="x-{1..1000000000..3}.tar"), r"datasets\[1\].shards: .*more than 10,000,000 shards"),
    (entry(shards="x-{5..1}.tar"), r"dataset\[1\].shards: .*runs backwards"),
    (entry(name=3), r"dataset\[1\].name: expected text, found 3"),
    (entry(extensions=""), r"dataset\[1\].extensions: holds an empty text"),
    (entry(extensions=[]), r"^(?!.*extensions.*extensions).*: dataset\[1\].extensions: is an empty list"),
    (entry(extensions="jpg,cls"), r"separate fields by blanks and alternatives by ';'"),
    (entry(extensions=" "), r"dataset\[1\].extensions: a list of fields is empty"),
    (entry(extensions=";"), r"dataset\[1\].extensions: cannot read ';'"),
    (entry(extensions="new="), r"dataset\[1\].extensions: cannot read 'new='"),
    (entry(extensions="jpg a=cls a=txt"), r"dataset\[1\].extensions: 'a' comes twice"),
    (entry(extensions="jpg", missing="drop"), r"dataset\[1\].missing: must be one of error, skip, none, found 'drop'"),
    (entry(missing="skip"), r"dataset\[1\].missing: is about the fields of extensions"),
    (entry(extensions={"jpg": 1}), r"dataset\[1\].extensions: expected text"),
    (entry(extensions="__key__"), r"dataset\[1\].extensions: '__key__' is not a field"),
    (entry(weight=1), r"dataset\[0\]: has no weight, other entries have one"),
    (entry(probability=0.5), r"dataset\[0\]: has no probability"),
    (entry(weight=1, probability=1), r"dataset\[1\]: has a weight and a probability"),
    ({"dataset": [{"shards": "x.tar", "weight": 1}, {"shards": "x.tar", "probability": 1}]}, "write one of them"),
    (entry(probability=1.5), r"dataset\[1\].probability: must be at most 1"),
    *(
        (entry(weight=weight), r"dataset\[1\].weight: expected a number above 0")
        for weight in (0, -1, True, "1", None, 10**400)
    ),
    ('{"dataset": [{"shards": "x.tar", "weight": NaN}]}', r"dataset\[0\].weight: .*found nan"),
    ('{"dataset": [{"shards": "x.tar", "weight": 1e999}]}', r"dataset\[0\].weight: .*found inf"),
    (entry(scale=1, shift=2), r"dataset\[1\]: has scale, shift, which only a function can use: pass transforms="),
    # datasets
    ({"datasets": {}}, "datasets: expected a list that is not empty"),
    ({"datasets": [3]}, r"datasets\[0\]: expected a mapping with keys name, buckets, shards, resample"),
    ({"datasets": [{"shards": "x.tar"}], "suffix": ""}, "unknown key 'suffix'; known are prefix, buckets, datasets"),
    ({"datasets": [{"shards": "x.tar"}], "prefix": 3}, "prefix: expected text, found 3"),
    ({"datasets": [{"shards": "x.tar"}], "buckets": ["a", "b"]}, "buckets: expected one bucket, found 2"),
    (source(scale=1), r"datasets\[1\]: unknown key 'scale'; known are name, buckets, shards, resample, choose"),
    (source(buckets=3), r"datasets\[1\].buckets: expected text"),
    (source(choose=1, resample=1), r"datasets\[1\]: has resample and choose; write one of them"),
    *((source(choose=n), r"datasets\[1\].choose: expected a whole number from 1") for n in (0, -1, 1.5, True, "2")),
    (source(resample=0), r"datasets\[1\].resample: expected a whole number from 1"),
    (source(choose=2), r"datasets\[1\]: 2 shards are to be chosen of 1"),
    (source(buckets="b", shards="x.tar::y.tar"), r"datasets\[1\].shards: .*not joined"),
    # wids
    (wids(wids_version=2), "wids_version: expected 1, found 2"),
    (wids(wids_version="1"), "wids_version: expected 1, found '1'"),
    (wids(__kind__="other"), "__kind__: expected 'wids-shard-index-v1'"),
    ({"wids_version": 1}, "neither a shardlist nor datasets"),
    ({"shardlist": []}, "neither a shardlist nor datasets"),
    (wids(shardlist={"url": "x.tar"}), "shardlist: expected a list of shards"),
    (wids(more=1), "unknown key 'more'; known are __kind__, wids_version"),
    (wids({"url": "x.tar", "size": 3}), r"shardlist\[1\]: unknown key 'size'; known are url, nsamples, filesize"),
    (wids("x.tar"), r"shardlist\[1\]: expected a mapping"),
    (wids({"nsamples": 3}), r"shardlist\[1\].url: expected the URL of a shard, found None"),
    (wids({"url": "x.tar", "nsamples": -1}), r"shardlist\[1\].nsamples: expected a whole number from 0, found -1"),
    (wids({"url": "x.tar", "nsamples": "3"}), r"shardlist\[1\].nsamples"),
    (wids({"url": "x.tar", "dataset": []}), r"shardlist\[1\].dataset: expected text"),
    (wids(base=3), "base: expected the URL of a folder"),
    (wids(name=3), "name: expected text"),
    (wids(datasets={}), "datasets: expected a list"),
    (wids(datasets=[{"name": "empty"}]), r"datasets\[0\].shardlist: expected a list of shards that is not empty"),
    (wids(datasets=[{"shards": "x.tar"}]), r"datasets\[0\]: unknown key 'shards'; known are name, base"),
    (wids(datasets=[{"source_url": 3}]), r"datasets\[0\].source_url: expected the URL"),
    (wids(datasets=[{"source_url": "y.json", "shardlist": []}]), r"datasets\[0\]: unknown key 'shardlist'"),
    (wids(datasets=[{"shardlist": [{"url": "x.tar"}], "weight": 1}]), "has no weight, other datasets have one"),
    (wids(datasets=[{"shardlist": [{"url": "x.tar"}], "weight": -1}]), r"datasets\[0\].weight: expected a number"),
]


@pytest.mark.parametrize(("content", "match"), WRONG, ids=lambda value: str(value)[:60])
def test_spec_raises_when_it_is_wrong(content: Any, match: str) -> None:
    """The message names the file, the entry and the key."""
    with pytest.raises(SpecError, match=r"dataset file spec\.json") as caught:
        load_dataset(save(content))
    caught.match(match.replace("[]", r"\[\]"))


def test_spec_raises_when_the_dict_is_wrong() -> None:
    """A dict is named as what it is."""
    with pytest.raises(SpecError, match=r"the dataset dict: dataset\[1\].name"):
        load_dataset(entry(name=3))
    with pytest.raises(SpecError, match="argument"):
        load_dataset({"dataset": [{"shards": "x.tar", 3: 4}]}, transforms=transform)


def test_spec_raises_when_the_function_does_not_take_its_keys() -> None:
    """Found out before the first sample."""
    with pytest.raises(SpecError, match=r"dataset\[1\]: transforms cannot be called with scael: .*'scael'"):
        load_dataset(save(entry(scael=3)), transforms=transform)
    assert len(list(load_dataset(save(entry(scale=3)), transforms=transform))) == 4


@pytest.mark.parametrize(
    "inner", [wids(datasets=[{"source_url": "x.json"}]), wids(datasets=[{"shardlist": [{"url": "x.tar"}]}])]
)
def test_wids_list_raises_when_it_points_more_than_one_level_down(inner: Any) -> None:
    """Also to itself."""
    save(inner, "inner.json")
    outer = save(wids(datasets=[{"source_url": "inner.json"}]))
    with pytest.raises(SpecError, match=r"inner\.json: datasets: .*spec\.json: datasets\[0\] points to .*one level"):
        load_dataset(outer)


# ---------------------------------------------------------------------------------------------------------- the text
def test_yaml_is_read_when_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON does not need it; without it YAML is an error that says how to get it."""
    assert parse_spec("dataset:\n- shards: x.tar\n  scale: [1, 2.5]") == {
        "dataset": [{"shards": "x.tar", "scale": [1, 2.5]}]
    }
    assert parse_spec("{dataset: [{shards: x.tar}]}") == {"dataset": [{"shards": "x.tar"}]}
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert len(list(load_dataset(save({"dataset": [{"shards": "x.tar"}]}, "spec.yaml")))) == 2
    with pytest.raises(ImportError, match=r"spec\.yaml is YAML.*torchdata_wds\[spec\]"):
        load_dataset(save("dataset:\n- shards: x.tar", "spec.yaml"))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("dataset: [x-{0..3}.tar]", "is not YAML.*\n.*pattern with braces needs quotes"),
        ("dataset:\n- shards: x.tar\n  shards: y.tar", "the key 'shards' twice in one mapping, line 3"),
        ("dataset: !!python/object/apply:os.system ['touch ran']", "is not YAML"),
        ("dataset: !!python/name:os.system", "is not YAML"),
        ("dataset: 2024-13-45", "not YAML: month must be"),
        ("dataset: [", "is not YAML"),
        ("a: 1\n---\nb: 2", "is not YAML"),
        ("dataset: " + "[" * 1000, "nested too deeply"),
        ("dataset: &a [*a]", r"dataset\[0\]: expected a mapping"),
        ("- " * 5 + "x", "is not a dataset file"),
        ("\x00", "is not YAML"),
        ("just text", "is not a dataset file.*found 'just text'"),
    ],
)
def test_yaml_raises_when_it_is_wrong(text: str, match: str) -> None:
    """Nothing but plain values is made of it."""
    with pytest.raises(SpecError, match=r"dataset file spec\.yaml") as caught:
        load_dataset(save(text, "spec.yaml"))
    assert re.search(match, str(caught.value), re.DOTALL), caught.value
    assert not Path("ran").exists()


def test_yaml_does_not_grow_when_aliases_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where mappings are merged nor where a message shows what is wrong."""
    merged = ["a0: &a0 {" + ", ".join(f"k{number}: 1" for number in range(10)) + "}"]
    merged += [f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 10)}]}}" for level in range(1, 12)]
    with suppress(SpecError):  # newer versions of PyYAML merge what is equal once
        assert {len(keys) for keys in parse_spec("\n".join(merged)).values()} == {10}
    monkeypatch.setattr("torchdata_wds.format.dataset_files.reading._MAX_MERGED", 15)
    assert len(parse_spec("\n".join(merged[:1]) + "\nb: {<<: *a0, x: 1}")["b"]) == 11
    with pytest.raises(SpecError, match="merges more than 15 keys"):
        parse_spec("a: &a {<<: {" + ", ".join(f"k{number}: 1" for number in range(16)) + "}}\n")
    nested = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    nested += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 12)]
    with pytest.raises(SpecError) as caught:
        load_dataset(save("\n".join([*nested, "dataset: *a11"]), "spec.yaml"))
    assert len(str(caught.value)) < 100_000
    assert parse_spec("base: &b {scale: 2, shift: 3}\ndataset:\n- <<: *b\n  shift: 4")["dataset"] == [
        {"scale": 2, "shift": 4}
    ]


def test_spec_file_raises_when_it_is_no_text_or_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard in its place, and one that never ends."""
    Path("spec.yaml").write_bytes(b"dataset: \xff")
    with pytest.raises(SpecError, match="not UTF-8 text"):
        load_dataset("spec.yaml")
    monkeypatch.setattr("torchdata_wds.format.dataset_files.reading._MAX_BYTES", 100)
    with pytest.raises(SpecError, match="larger than 100 bytes"):
        load_dataset(save(entry(name="x" * 100)))


def test_spec_file_may_begin_with_a_byte_order_mark() -> None:
    """As Windows writes it."""
    Path("spec.json").write_text(json.dumps(entry()), encoding="utf-8-sig")
    assert len(list(load_dataset("spec.json"))) == 4


# ------------------------------------------------------------------------------------------------------------- trust
PIPES: list[Any] = [
    entry(shards="pipe:touch ran; cat x.tar"),
    entry(shards="PIPE:touch ran; cat x.tar"),
    entry(shards=["x.tar", "pipe:touch ran; cat x.tar"]),
    entry(shards="{x.tar,pipe:touch ran}"),
    entry(shards="pi{p,q}e:touch ran"),
    entry(shards="x.tar::pipe:touch ran"),
    entry(shards="{a,b}.tar::p{i..i}pe:touch ran"),
    entry(shards="zip://*.tar::pipe:touch ran"),
    source(shards="pipe:touch ran; cat x.tar"),
    source(shards=["x.tar", "pipe:touch ran"], choose=1),
    {"prefix": "pipe:touch ran; cat ", "datasets": [{"shards": "x.tar"}]},
    {"prefix": "pi", "datasets": [{"shards": "pe:touch ran"}]},
    {"prefix": "p{i,", "buckets": "x}pe:touch ran; cat .", "datasets": [{"shards": "x.tar"}]},
    {"buckets": "pipe:touch ran; cat .", "datasets": [{"shards": "x.tar"}]},
    source(buckets=["pipe:touch ran; cat ."]),
    wids({"url": "pipe:touch ran; cat x.tar"}),
    wids(base="pipe:touch ran; cat ."),
    wids(datasets=[{"source_url": "pipe:touch ran; cat list.json"}]),
    wids(datasets=[{"base": "pipe:touch ran; cat .", "shardlist": [{"url": "x.tar"}]}]),
    wids(datasets=[{"source_url": "unsafe.json"}]),
]
OTHERS: list[Any] = [
    entry(shards="-"),
    entry(shards=["{-,x.tar}"]),
    entry(shards="x.tar::-"),
    source(shards="-"),
    wids({"url": "-"}),
    wids(datasets=[{"source_url": "-"}]),
    entry(shards="reference://x.tar::list.json"),
    entry(shards="simplecache::reference://x.tar::http://127.0.0.1:9/list.json"),
    wids({"url": "reference://x.tar::list.json"}),
]


@pytest.mark.parametrize("content", PIPES + OTHERS, ids=lambda value: json.dumps(value)[:70])
def test_file_raises_when_it_is_not_trusted(content: Any) -> None:
    """Commands, however hidden, standard input and templates are refused, before anything ran."""
    save(wids({"url": "pipe:touch ran"}), "unsafe.json")
    with pytest.raises(UnsafeDataError, match=r"dataset file (spec|unsafe)\.json: .*allow_pipe=True"):
        load_dataset(save(content))
    assert not Path("ran").exists()


def test_files_from_elsewhere_raise_when_they_are_not_trusted(folder: Path) -> None:
    """YAML, a file on a server, and a file that a dict points to, as well."""
    with pytest.raises(UnsafeDataError):
        load_dataset(save("dataset:\n  - shards: pipe:touch ran\n", "spec.yaml"))
    save(wids({"url": "pipe:touch ran"}))
    with serve_folder(folder) as server:
        for outer in (f"{server}/spec.json", {"wids_version": 1, "datasets": [{"source_url": f"{server}/spec.json"}]}):
            with pytest.raises(UnsafeDataError, match=r"dataset file http.*spec\.json: shardlist\[1\]"):
                load_dataset(outer)
    with pytest.raises(UnsafeDataError):
        load_dataset({"wids_version": 1, "datasets": [{"source_url": "spec.json"}]})


def test_file_raises_when_a_glob_finds_a_command() -> None:
    """A file's name may be one; it is looked at again when it is listed."""
    write_tar(Path("pipe:touch ran;.tar"), [])
    pipe = load_dataset(save({"dataset": [{"shards": "*.tar"}]}))
    with pytest.raises(UnsafeDataError, match="runs a command"):
        list(pipe)
    with pytest.raises(UnsafeDataError, match="runs a command"):
        load_dataset(save({"datasets": [{"shards": "*.tar", "choose": 1}]}))
    assert not Path("ran").exists()


def test_file_raises_when_a_command_hides_behind_many_shards() -> None:
    """Farther than what is looked at beforehand."""
    pipe = load_dataset(save(entry(shards="{x-{0..2000}.tar,pipe:touch ran}")))
    with pytest.raises(UnsafeDataError, match="runs a command"):
        list(pipe)
    assert not Path("ran").exists()


COMMAND = "pipe:touch ran; cat x.tar"


@pytest.mark.parametrize(
    "content",
    [
        {"dataset": [{"shards": COMMAND}]},
        {"prefix": "pipe:touch ran; cat ", "datasets": [{"shards": "x.tar"}]},
        {"shardlist": [{"url": COMMAND}]},
    ],
)
def test_commands_run_when_the_file_is_trusted(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With allow_pipe=True, and in a dict, which the program wrote; never under WDS_SECURE=1."""
    for trusted, options in ((save(content), {"allow_pipe": True}), (content, {})):
        pipe = load_dataset(trusted, **options)
        assert not Path("ran").exists()
        assert len(list(pipe)) == 2
        Path("ran").unlink()
        with monkeypatch.context() as patch:
            patch.setenv("WDS_SECURE", "1")
            with pytest.raises(UnsafeDataError, match="WDS_SECURE"):
                load_dataset(trusted, **options)
            with pytest.raises(UnsafeDataError):
                list(pipe)
        assert not Path("ran").exists()


def test_file_given_as_a_command_is_read_when_the_program_says_so() -> None:
    """The argument is the program's own; what the file says is not. Relative names mean the working directory."""
    save(wids())
    assert len(list(load_dataset("pipe:cat spec.json"))) == 4
    save(wids({"url": COMMAND}))
    with pytest.raises(UnsafeDataError):
        load_dataset("pipe:cat spec.json")


@pytest.mark.parametrize(
    "content",
    [
        {"datasets": [{"shards": "http://127.0.0.1:9/$MY_SECRET_KEY.tar"}]},
        {"datasets": [{"shards": "http://127.0.0.1:9/${AWS_SESSION_TOKEN}.tar"}]},
        {"prefix": "http://127.0.0.1:9/$DB_PASSWORD/", "datasets": [{"shards": "x.tar"}]},
        {"buckets": "$API_KEY", "datasets": [{"shards": "x.tar"}]},
    ],
)
def test_file_raises_when_it_asks_for_a_secret(content: Any) -> None:
    """A URL would take it to a server."""
    with pytest.raises(UnsafeDataError, match=r"environment variable \w+, whose name says that it is secret"):
        load_dataset(save(content))
    load_dataset(save(content), allow_pipe=True)
    load_dataset(content)


def test_file_raises_when_it_comes_from_the_network_and_asks_for_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its name; a file on disk gets it."""
    monkeypatch.setenv("FOLDER_OF_TEST", str(folder))
    save({"datasets": [{"shards": "$FOLDER_OF_TEST/x.tar"}]})
    assert len(list(load_dataset("spec.json"))) == 2
    with serve_folder(folder) as server:
        with pytest.raises(UnsafeDataError, match="FOLDER_OF_TEST, which no file from another machine gets"):
            load_dataset(f"{server}/spec.json")
        assert len(list(load_dataset(f"{server}/spec.json", allow_pipe=True))) == 2


def test_messages_mask_secrets_when_urls_hold_some() -> None:
    """Of the file and of its shards."""
    with pytest.raises(UnsafeDataError) as caught:
        load_dataset(save(entry(shards="pipe:curl -H 'Authorization: Bearer abc123' http://host/x.tar")))
    assert "abc123" not in str(caught.value)


@pytest.mark.parametrize(
    ("folder_url", "url", "expected"),
    [
        ("", "x.tar", "x.tar"),
        ("d/", "x.tar", "d/x.tar"),
        ("d", "../x.tar", "d/../x.tar"),
        ("d/", "/x.tar", "/x.tar"),
        ("https://host/d/", "../x.tar", "https://host/x.tar"),
        ("https://host/d", "e/x.tar?v=1", "https://host/d/e/x.tar?v=1"),
        ("s3://b", "x.tar", "s3://b/x.tar"),
        ("s3://b/d", "gs://c/x.tar", "gs://c/x.tar"),
        ("s3://b/d", "file:x.tar", "file:x.tar"),
        ("simplecache::s3://b/d/", "x.tar", "simplecache::s3://b/d/x.tar"),
    ],
)
def test_join_url_gives_the_url_when_it_is_relative(folder_url: str, url: str, expected: str) -> None:
    """Absolute paths and URLs stay as they are."""
    assert join_url(folder_url, url) == expected


def test_folder_of_gives_what_names_are_relative_to() -> None:
    """A file: URL becomes a path, for relative names are not percent-encoded."""
    assert folder_of("file:///a%20b/list.json") == "/a b/"
    assert folder_of("s3://b/d/list.json") == "s3://b/d/"
    assert folder_of("pipe:cat /d/list.json") == ""
