"""The graphs of dataset files: which samples come, how often, and what they carry.

What a file may not say is tested with the format, copies of shards with storage.
"""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from tests.kits.processes import open_files
from tests.kits.servers import serve_folder
from tests.kits.shards import sample_members, text_samples, write_tar
from tests.kits.workers_kit import loader_of, time_limit
from torchdata_wds import (
    DuplicateFieldError,
    MissingFieldError,
    ShardListError,
    ShardOpenError,
    SpecError,
    handlers,
    ignore_and_continue,
    index_shard,
    load_dataset,
    wids_index,
)
from torchdata_wds.consumers import upstream

SAMPLES = 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with shards a-0 to a-3, b-0 to b-3 and c-0 to c-3 of three samples each."""
    for name in "abc":
        for number in range(4):
            write_tar(tmp_path / f"{name}-{number}.tar", text_samples(f"{name}{number}-", SAMPLES))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(name: str, content: Any) -> str:
    """Writes a file, in JSON unless it is a str."""
    Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return name


def counted(pipe: Any) -> Counter[Any]:
    """How many samples each dataset gives."""
    return Counter(sample["__dataset__"] for sample in pipe)


def keys_of(pipe: Any) -> list[str]:
    return [sample["__key__"] for sample in pipe]


def shards_of(pipe: Any) -> list[str]:
    """The shards that an epoch reads, in order, with repetitions."""
    urls = [Path(sample["__url__"]).name for sample in pipe]
    assert len(urls) % SAMPLES == 0
    return urls[::SAMPLES]


def names_of(pipe: Any) -> list[str]:
    """The classes of a graph's pipes, last one first."""
    return [type(found).__name__.removesuffix("IterDataPipe") for found in upstream(pipe)]


def consumers(pipe: Any, count: int) -> list[Any]:
    """Copies of a pipe as the workers of one service have them."""
    copies = [deepcopy(pipe) for _ in range(count)]
    for number, copy in enumerate(copies):
        apply_sharding(copy, count, number)
    return copies


def epoch_of(pipes: list[Any], seed: int) -> list[str]:
    """The shards that consumers read in an epoch, which their service seeds."""
    for pipe in pipes:
        apply_random_seed(pipe, torch.Generator().manual_seed(seed))
    return sorted(url for pipe in pipes for url in shards_of(pipe))


# -------------------------------------------------------------------------------------------------------- dataset:
YAML_WITH_KEYS = """
dataset:
  - shards: a-{0..3}.tar
    scaleprob: 0.3

  - shards:
      - b-0.tar
      - b-{1..3}.tar
    name: bees
    scale: [1.0, 3.0]

  - shards: c-*.tar
    scale: [0.4, 1.0]
    extensions: nrm.png;txt;json cls
"""


def augmented(sample: dict[str, Any], scale: Any = (), scaleprob: float = 1.0) -> dict[str, Any]:
    return {**sample, "scale": tuple(scale), "scaleprob": scaleprob}


def test_load_dataset_gives_every_sample_with_its_keys_when_entries_have_some(folder: Path) -> None:
    """The YAML of WebDataset's documentation: free keys go to the function, extensions are what is kept."""
    samples = list(load_dataset(save("x.yaml", YAML_WITH_KEYS), transforms=augmented))
    assert counted(samples) == {0: 12, "bees": 12, 2: 12}
    assert len({sample["__key__"] for sample in samples}) == 36
    found = {
        sample["__dataset__"]: (
            sample["scale"],
            sample["scaleprob"],
            {field for field in sample if not field.startswith(("__", "scale"))},
        )
        for sample in samples
    }
    everything = {"txt", "json", "cls"}
    assert found == {
        0: ((), 0.3, everything),
        "bees": ((1.0, 3.0), 1.0, everything),
        2: ((0.4, 1.0), 1.0, {"txt", "cls"}),
    }
    assert {type(sample["__url__"]) for sample in samples} == {str}
    assert {sample["__url__"] for sample in samples} == {
        f"{name}-{number}.tar" for name in "abc" for number in range(4)
    }


def test_load_dataset_shuffles_all_shards_as_one_list_when_no_entry_has_a_weight(folder: Path) -> None:
    """Shards of different entries follow each other, in another order each epoch, and nothing is mixed."""
    torch.manual_seed(0)
    pipe = load_dataset({"dataset": [{"shards": "a-{0..3}.tar"}, {"shards": "b-{0..3}.tar"}]})
    assert names_of(pipe) == ["EntryMapper", "KeyGrouper", "ShardLoader", "ShardingFilter", "Shuffler", "SpecShards"]
    orders = [shards_of(pipe) for _ in range(4)]
    assert len({tuple(order) for order in orders}) == 4
    assert any("".join(url[0] for url in order) not in ("aaaabbbb", "bbbbaaaa") for order in orders)
    assert {tuple(sorted(order)) for order in orders} == {tuple(f"{n}-{i}.tar" for n in "ab" for i in range(4))}


def test_load_dataset_keeps_entries_apart_when_they_share_a_shard(folder: Path) -> None:
    """One shard in two entries comes twice, once for each."""
    entries = [{"shards": "a-0.tar", "name": "one", "scale": [1]}, {"shards": "a-0.tar", "name": "two"}]
    samples = list(load_dataset({"dataset": entries}, transforms=augmented))
    assert counted(samples) == {"one": 3, "two": 3}
    assert {(sample["__dataset__"], sample["scale"]) for sample in samples} == {("one", (1,)), ("two", ())}


@pytest.mark.parametrize("key", ["weight", "probability"])
@pytest.mark.parametrize(
    ("stop", "expected"), [("all", {0: 12, 1: 3}), ("cycle", {0: (12, 12), 1: (30, 400)}), ("first", {1: 3})]
)
def test_load_dataset_mixes_entries_when_they_have_weights(folder: Path, key: str, stop: str, expected: Any) -> None:
    """The numbers are relative, and `stop` is that of wds_mix."""
    entries = [{"shards": "a-{0..3}.tar", key: 0.1}, {"shards": "b-0.tar", key: 0.9}]
    pipe = load_dataset(save("x.json", {"dataset": entries}), stop=stop)
    apply_random_seed(pipe, torch.Generator().manual_seed(1))
    found = counted(pipe)
    for name, count in expected.items():
        least, most = count if isinstance(count, tuple) else (count, count)
        assert least <= found[name] <= most, found


def test_load_dataset_needs_no_mixing_when_there_is_one_entry_with_a_weight(folder: Path) -> None:
    """There is nothing to mix it with."""
    pipe = load_dataset({"dataset": [{"shards": "a-0.tar", "weight": 3}]})
    assert keys_of(pipe) == ["a0-00000", "a0-00001", "a0-00002"]


@pytest.fixture
def mixed_fields(folder: Path) -> str:
    """A shard whose samples have different fields."""
    members = sample_members("x", jpg=b"j", png=b"p", cls=b"1") + sample_members("y", png=b"p", txt=b"t", cls=b"2")
    return write_tar(folder / "m.tar", [*members, *sample_members("z", wav=b"w", json=b"{}")])


def fields_of(pipe: Any) -> dict[str, dict[str, bytes]]:
    """What each sample of a pipe holds."""
    return {sample["__key__"]: {name: sample[name] for name in sample if name[0] != "_"} for sample in pipe}


def test_load_dataset_keeps_and_renames_fields_when_an_entry_lists_them(mixed_fields: str) -> None:
    """Alternatives, new names and globs, as the commands of wds take them; samples left out are counted."""
    for extensions, missing, found in [
        (".JPG;png  cls", "skip", {"x": {"jpg": b"j", "cls": b"1"}, "y": {"png": b"p", "cls": b"2"}}),
        (["jpg", "cls"], "none", {"x": {"jpg": b"j", "cls": b"1"}, "y": {"cls": b"2"}, "z": {}}),
        ("image=jpg;png Label=cls", "skip", {"x": {"image": b"j", "Label": b"1"}, "y": {"image": b"p", "Label": b"2"}}),
        ("*g", "skip", {"x": {"jpg": b"j", "png": b"p"}, "y": {"png": b"p"}}),
        ("cls jpg=png png=jpg", "skip", {"x": {"cls": b"1", "jpg": b"p", "png": b"j"}}),
    ]:
        pipe = load_dataset({"dataset": [{"shards": mixed_fields, "extensions": extensions, "missing": missing}]})
        assert fields_of(pipe) == found
        assert pipe.skipped == ({"MissingFieldError": 3 - len(found)} if len(found) < 3 else {})


@pytest.mark.parametrize("missing", ["skip", "none"])
def test_load_dataset_warns_when_no_sample_has_an_optional_field(
    mixed_fields: str, missing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for each such field; fields that some have, and entries without samples, are silent."""
    monkeypatch.setattr(handlers, "said", set())
    entries = [{"shards": mixed_fields, "extensions": text, "missing": missing} for text in ("jpg cls", "jpgg cls")]
    for _ in range(2):
        list(load_dataset({"dataset": entries}))
    (message,) = caplog.messages
    assert "dataset[1].extensions names 'jpgg', which none of 3 samples has" in message


@pytest.mark.parametrize("extensions", ["jpgg", "jpgg txt", "txt jpgg", "image=jpgg", "image=jpgg;pngg", "*.jpgg"])
def test_load_dataset_raises_when_a_sample_lacks_a_field_that_its_entry_lists(folder: Path, extensions: str) -> None:
    """The error names the entry, the sample and what it has; a handler may skip such samples, which are counted."""
    entries = [{"shards": "a-0.tar", "extensions": "txt"}, {"shards": "b-0.tar", "extensions": extensions}]
    with pytest.raises(MissingFieldError, match=r"dataset\[1\].extensions: sample 'b0-0") as caught:
        list(load_dataset({"dataset": entries}))
    assert "it has ['txt', 'json', 'cls']" in str(caught.value)
    assert (caught.value.shard, str(caught.value.key)[:3]) == ("b-0.tar", "b0-")
    assert "jpgg" in str(caught.value.field)
    pipe = load_dataset({"dataset": entries}, handler=ignore_and_continue)
    assert {sample["__dataset__"] for sample in pipe} == {0}
    assert pipe.skipped == {"MissingFieldError": 3}


def test_load_dataset_raises_when_two_fields_of_an_entry_get_one_name(mixed_fields: str) -> None:
    """Neither is silently preferred."""
    content = {"dataset": [{"shards": mixed_fields, "extensions": "png=jpg p*", "missing": "skip"}]}
    with pytest.raises(DuplicateFieldError, match=r"dataset\[0\].extensions"):
        list(load_dataset(content))


def test_load_dataset_reads_elsewhere_when_it_has_rules(folder: Path) -> None:
    """The rules reach the file, the listing and the loader; samples keep the URL that was asked for."""
    save("x.json", json.dumps({"dataset": [{"shards": "gs://b/a-{0..1}.tar"}]}))
    pipe = load_dataset("gs://b/x.json", rewrite={"gs://b/": f"{folder}/"})
    assert counted(list(pipe)) == {0: 2 * SAMPLES}
    assert {sample["__url__"] for sample in pipe} == {"gs://b/a-0.tar", "gs://b/a-1.tar"}


def test_load_dataset_notes_the_sample_when_the_function_raises(folder: Path) -> None:
    """As every stage with a function does."""
    with pytest.raises(ValueError, match="not this one") as caught:
        list(load_dataset({"dataset": [{"shards": "a-0.tar"}]}, transforms=picky))
    (note,) = caught.value.__notes__
    assert "sample 'a0-00001' of shard a-0.tar" in note


def takes_anything(sample: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {**sample, "keys": keys}


def takes_weights(sample: dict[str, Any], weights: int) -> dict[str, Any]:
    return {**sample, "weights": weights}


@pytest.mark.parametrize("key", ["extension", "Extensions", "weights", "shard", "mising", "probabilty"])
def test_load_dataset_raises_when_a_key_is_nearly_one_of_its_own(folder: Path, key: str) -> None:
    """Where the function takes any keys, a misspelled one would go there unseen."""
    content = {"dataset": [{"shards": "a-0.tar", key: 3}]}
    with pytest.raises(SpecError, match=rf"dataset\[0\]: unknown key '{key}': did you mean"):
        load_dataset(content, transforms=takes_anything)
    if key == "weights":
        assert {sample["weights"] for sample in load_dataset(content, transforms=takes_weights)} == {3}


def picky(sample: dict[str, Any], **keys: Any) -> Any:
    if sample["__key__"].endswith("0"):
        return None
    if sample["__key__"].endswith("1"):
        raise ValueError("not this one")
    return {"text": sample["txt"], "keys": keys}


def test_load_dataset_drops_and_skips_when_the_function_says_so(folder: Path) -> None:
    """None drops a sample, an exception goes to the handler, and a new dict gets its metadata back."""
    content = {"dataset": [{"shards": "a-0.tar", "n": 1}, {"shards": "b-0.tar"}]}
    pipe = load_dataset(content, transforms=picky, handler=ignore_and_continue)
    assert sorted(pipe, key=str) == [
        {"__key__": "a0-00002", "__url__": "a-0.tar", "__dataset__": 0, "text": b"text of a0-00002", "keys": {"n": 1}},
        {"__key__": "b0-00002", "__url__": "b-0.tar", "__dataset__": 1, "text": b"text of b0-00002", "keys": {}},
    ]
    assert pipe.skipped == {"None": 2, "ValueError": 2}
    with pytest.raises(ValueError, match="not this one"):
        list(load_dataset(content, transforms=picky))
    with pytest.raises(TypeError, match="length"):
        len(pipe)


def test_load_dataset_calls_the_function_when_no_entry_has_keys(folder: Path) -> None:
    """For all three kinds of files."""
    contents: list[Any] = [
        {"dataset": [{"shards": "a-0.tar"}]},
        {"datasets": [{"shards": "a-0.tar"}]},
        {"shardlist": [{"url": "a-0.tar"}]},
    ]
    for content in contents:
        assert {sample["scaleprob"] for sample in load_dataset(content, transforms=augmented)} == {1.0}


def test_load_dataset_gives_its_handler_to_every_stage_when_shards_fail(folder: Path) -> None:
    """A missing shard costs itself only."""
    content = {"dataset": [{"shards": ["missing.tar", "a-0.tar"]}]}
    assert counted(load_dataset(content, handler=ignore_and_continue)) == {0: 3}
    with pytest.raises(ShardOpenError, match=r"missing\.tar"):
        list(load_dataset(content))
    with pytest.raises(ShardListError, match=r"no-\*\.tar"):
        list(load_dataset({"dataset": [{"shards": "no-*.tar"}]}))


# ------------------------------------------------------------------------------------- prefix, buckets and datasets
YAML_WITH_BUCKETS = """
prefix: $SHARDS_OF_THIS_TEST/
buckets: inner
datasets:
  - name: all of a
    shards: a-{0..3}.tar
  - name: two of b
    shards: ["b-{0..1}.tar", b-2.tar, b-3.tar]
    choose: 2
  - buckets: [.]
    shards: c-{0..3}.tar
    resample: 6
"""


@pytest.fixture
def bucketed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "inner").mkdir()
    for path in [*folder.glob("a-*.tar"), *folder.glob("b-*.tar")]:
        path.rename(folder / "inner" / path.name)
    monkeypatch.setenv("SHARDS_OF_THIS_TEST", str(folder))
    return save("x.yaml", YAML_WITH_BUCKETS)


def test_load_dataset_draws_shards_when_an_entry_says_how_many(bucketed: str) -> None:
    """All of the first, two different ones of the second and six of the third, with others each epoch."""
    torch.manual_seed(0)
    pipe = load_dataset(bucketed)
    assert counted(pipe) == {"all of a": 12, "two of b": 6, "@.": 18}
    draws = []
    for _ in range(12):
        shards = shards_of(pipe)
        assert sorted(url for url in shards if url[0] == "a") == [f"a-{number}.tar" for number in range(4)]
        chosen = sorted(url for url in shards if url[0] == "b")
        assert len(set(chosen)) == len(chosen) == 2
        draws.append((tuple(chosen), tuple(sorted(url for url in shards if url[0] == "c"))))
    assert {url for chosen, _ in draws for url in chosen} == {f"b-{number}.tar" for number in range(4)}
    assert len(set(draws)) > 6
    assert any(len(set(drawn)) < 4 for _, drawn in draws)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_consumers_agree_on_the_draw_when_the_shards_are_split(bucketed: str, count: int) -> None:
    """Together they read what one of them would have read, in each epoch, and epochs differ."""
    pipe = load_dataset(bucketed)
    alone, several = consumers(pipe, 1), consumers(pipe, count)
    epochs = []
    for seed in range(3):
        together = epoch_of(several, seed)
        assert len(together) == 12
        assert together == epoch_of(alone, seed)
        epochs.append(tuple(together))
    assert len(set(epochs)) == 3


def test_load_dataset_draws_the_same_when_seeded_alike(bucketed: str) -> None:
    """On all machines: the order is written down here."""
    pipe = load_dataset(bucketed)
    (shards,) = (found for found in upstream(pipe) if type(found).__name__ == "SpecShardsIterDataPipe")
    shards.set_seed(3)
    assert [" ".join(Path(url).stem for url in shards) for _ in range(2)] == [
        "a-0 a-1 a-2 a-3 b-2 b-3 c-3 c-1 c-3 c-0 c-0 c-1",
        "a-0 a-1 a-2 a-3 b-2 b-0 c-3 c-0 c-1 c-1 c-2 c-2",
    ]


@pytest.mark.parametrize("key", ["choose", "perepoch"])
def test_load_dataset_raises_at_once_when_more_shards_are_chosen_than_there_are(folder: Path, key: str) -> None:
    """Braces, lists and globs are counted; what vanishes later is found out by the epoch."""
    for shards in ("a-{0..3}.tar", ["a-0.tar", "a-{1..3}.tar"], "a-*.tar"):
        with pytest.raises(SpecError, match=r"datasets\[0\]: 5 shards are to be chosen of 4"):
            load_dataset({"datasets": [{"shards": shards, key: 5}]})
    pipe = load_dataset({"datasets": [{"shards": "a-*.tar", key: 4}]})
    assert len(keys_of(pipe)) == 12
    Path("a-3.tar").unlink()
    with pytest.raises(SpecError, match="4 shards are to be chosen of 3"):
        list(pipe)


def test_load_dataset_expands_home_when_a_bucket_begins_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell does; what is not set stays as it is."""
    monkeypatch.setenv("HOME", str(folder))
    assert len(keys_of(load_dataset({"buckets": "~", "datasets": [{"shards": "a-{0..3}.tar"}]}))) == 12
    with pytest.raises(ShardOpenError, match=r"\$NOT_SET_ANYWHERE/a-0"):
        list(load_dataset({"datasets": [{"shards": "$NOT_SET_ANYWHERE/a-0.tar"}]}))


# ------------------------------------------------------------------------------------------------------------- wids
def wids(*urls: str, **more: Any) -> dict[str, Any]:
    return {"wids_version": 1, "shardlist": [{"url": url, "nsamples": SAMPLES} for url in urls], **more}


def test_wids_list_is_relative_to_its_own_folder_when_it_has_no_base(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk as on a server; URLs are verbatim, so braces are no pattern."""
    content = wids("a-0.tar", str(folder / "b-0.tar"), __kind__="wids-shard-index-v1", name="ab", info={"x": 1})
    save("list.json", content)
    (folder / "a-0.tar").rename(folder / "a-{0..0}.tar")
    save("braces.json", wids("a-{0..0}.tar"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert counted(load_dataset(folder / "braces.json")) == {0: 3}
    (folder / "a-{0..0}.tar").rename(folder / "a-0.tar")
    assert counted(load_dataset(folder / "list.json")) == {"ab": 6}
    with serve_folder(folder) as server:
        samples = list(load_dataset(f"{server}/list.json?version=1/2"))
        assert {sample["__url__"] for sample in samples} == {f"{server}/a-0.tar", str(folder / "b-0.tar")}


def test_wids_list_names_the_datasets_when_it_has_several(folder: Path) -> None:
    """Each with its own base, one of them in another file that has a folder of its own."""
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / f"{name}.tar").write_bytes((folder / "c-0.tar").read_bytes())
        (folder / f"{name}.tar").rename(folder / name / "x.tar")
    save("two/list.json", wids("x.tar", name="second"))
    datasets = [
        {"name": "first", "base": "one", "shardlist": [{"url": "x.tar", "nsamples": 3}]},
        {"source_url": "two/list.json"},
        {"shardlist": [{"url": "b-0.tar"}, {"url": "b-1.tar", "dataset": "own"}]},
    ]
    path = save("list.json", wids("a-0.tar", name="top", datasets=datasets))
    assert counted(load_dataset(path)) == {"top": 3, "first": 3, "second": 3, 3: 3, "own": 3}
    datasets[1]["name"] = "renamed"
    assert "renamed" in counted(load_dataset(save("list.json", {"wids_version": 1, "datasets": datasets})))


def test_wids_list_mixes_datasets_when_they_have_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The weight beside a source_url counts; those of single shards do not, which a warning says."""
    save("b.json", wids(*(f"b-{number}.tar" for number in range(4)), weight=77))
    datasets = [{"source_url": "b.json", "weight": 3}, {"shardlist": [{"url": "c-0.tar", "weight": 9}], "weight": 1}]
    pipe = load_dataset(save("list.json", {"wids_version": 1, "datasets": datasets}))
    assert names_of(pipe)[0] == "SampleMixer"
    assert pipe.weights == (3.0, 1.0)
    assert counted(pipe) == {0: 12, 1: 3}
    assert "weights of single shards are not used" in caplog.text


def test_wids_list_of_this_package_loads_when_written_beside_its_shards(folder: Path) -> None:
    """What wids_index makes is what load_dataset reads."""
    indexes = {name: index_shard(name) for name in ("a-0.tar", "b-0.tar")}
    save("list.json", wids_index(indexes, name="ours"))
    assert counted(load_dataset("list.json")) == {"ours": 6}


# ------------------------------------------------------------------------------------------------------- cache_dir
@pytest.fixture
def remote() -> Iterator[Callable[..., str]]:
    """Puts shards of three samples into fsspec's memory."""
    import fsspec

    memory = fsspec.filesystem("memory")

    def put(name: str, source: Path) -> str:
        memory.pipe(f"/dataset_files/{name}", source.read_bytes())
        return f"memory://dataset_files/{name}"

    yield put
    if memory.exists("/dataset_files"):
        memory.rm("/dataset_files", recursive=True)


def test_load_dataset_reads_copies_when_it_has_a_cache_dir(folder: Path, remote: Callable[..., str]) -> None:
    """Remote shards are downloaded by the first epoch only, and keep their URL; local files are read where they are."""
    urls = [remote(f"{name}.tar", folder / f"{name}.tar") for name in ("a-0", "a-1")]
    pipe = load_dataset({"dataset": [{"shards": [*urls, "b-0.tar"]}]}, cache_dir=folder / "cache")
    assert not (folder / "cache").exists()
    first = sorted(pipe, key=str)
    assert {sample["__url__"] for sample in first} == {*urls, "b-0.tar"}
    assert len(list((folder / "cache").glob("*.tar"))) == 2
    import fsspec

    fsspec.filesystem("memory").rm("/dataset_files", recursive=True)
    before = open_files()
    assert sorted(pipe, key=str) == first
    stopped = iter(pipe)
    next(stopped)
    del stopped
    assert open_files() <= before


def test_load_dataset_asks_the_handler_when_a_shard_cannot_be_copied(folder: Path, remote: Callable[..., str]) -> None:
    """One that is missing; where the folder is none, shards are read all the same."""
    entries = [{"shards": [remote("a.tar", folder / "a-0.tar"), "memory://dataset_files/missing.tar"]}]
    assert counted(load_dataset({"dataset": entries}, cache_dir="cache", handler=ignore_and_continue)) == {0: 3}
    with pytest.raises(ShardOpenError, match=r"missing\.tar"):
        list(load_dataset({"dataset": entries}, cache_dir="cache"))
    assert counted(load_dataset({"dataset": [{"shards": entries[0]["shards"][0]}]}, cache_dir=folder / "a-0.tar")) == {
        0: 3
    }


# ------------------------------------------------------------------------------------------------ the pipe and others
def test_load_dataset_raises_when_an_argument_is_wrong() -> None:
    """At once, and not about the file."""
    for argument, options, error in [
        (3, {}, TypeError),
        (b"x.yaml", {}, TypeError),
        ([{"shards": "a-0.tar"}], {}, TypeError),
        (None, {"stop": "never"}, ValueError),
        (None, {"stop": None}, ValueError),
        (None, {"allow_pipe": 1}, TypeError),
        (None, {"transforms": "resize"}, TypeError),
        (None, {"handler": "warn"}, TypeError),
        (None, {"cache_dir": 3}, ValueError),
        (None, {"cache_dir": ""}, ValueError),
        (None, {"storage_options": {"s3": 3}}, TypeError),
    ]:
        with pytest.raises(error) as caught:
            load_dataset({"dataset": [{"shards": "a.tar"}]} if argument is None else argument, **options)
        assert not isinstance(caught.value, SpecError)


def test_load_dataset_raises_when_the_file_cannot_be_read() -> None:
    """It is named as what it is."""
    with pytest.raises(ShardOpenError, match=r"dataset file no/such\.yaml cannot be read"):
        load_dataset("no/such.yaml")


def test_load_dataset_opens_no_shard_when_called(tmp_path: Path) -> None:
    """Shards are listed and read by the epoch."""
    pipe = load_dataset({"dataset": [{"shards": str(tmp_path / "*.tar")}]})
    write_tar(tmp_path / "late.tar", text_samples("x", 2))
    assert len(keys_of(pipe)) == 2


@pytest.mark.parametrize("weights", [{}, {"weight": 1}])
def test_load_dataset_pickles_at_any_time(bucketed: str, weights: dict[str, Any]) -> None:
    """Before, during and after an epoch; entries and graph survive."""
    content = {"dataset": [{"shards": f"c-{number}.tar", "scale": [1], **weights} for number in range(2)]}
    for pipe in (load_dataset(content, transforms=augmented), load_dataset(bucketed)):
        expected = counted(pipe)
        copies = [pickle.loads(pickle.dumps(pipe))]
        stream = iter(pipe)
        next(stream)
        copies.append(pickle.loads(pickle.dumps(pipe)))
        list(stream)
        copies.append(pickle.loads(pickle.dumps(pipe)))
        assert [counted(copy) for copy in copies] == [expected] * 3
        assert len(traverse_dps(pipe)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("weight", [{}, {"weight": 1}])
def test_load_dataset_gives_each_sample_once_when_a_dataloader_has_workers(
    folder: Path, workers: int, weight: dict[str, Any], remote: Callable[..., str]
) -> None:
    """Whole epochs, mixed or not, with copies of remote shards."""
    with serve_folder(folder) as server:
        entries = [{"shards": [f"{server}/{name}-{number}.tar" for number in range(4)], **weight} for name in "ab"]
        pipe = load_dataset({"dataset": entries}, cache_dir=folder / "cache")
        loader = DataLoader(pipe, batch_size=None, num_workers=workers, collate_fn=dict)
        for _ in range(2):
            keys = keys_of(loader)
            assert sorted(keys) == sorted(f"{n}{i}-{k:05d}" for n in "ab" for i in range(4) for k in range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_load_dataset_draws_alike_when_the_service_has_workers(bucketed: str, workers: int) -> None:
    """As under a DataLoader; epochs differ."""
    loader = loader_of(load_dataset(bucketed), workers)
    with time_limit(60):
        epochs = [list(loader) for _ in range(4)]
        loader.shutdown()
    for samples in epochs:
        assert counted(samples) == {"all of a": 12, "two of b": 6, "@.": 18}
    assert len({tuple(sorted(keys_of(samples))) for samples in epochs}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_load_dataset_draws_alike_when_a_dataloader_has_workers(bucketed: str, workers: int) -> None:
    """Chosen shards come once, by whichever worker, and epochs differ."""
    loader = DataLoader(load_dataset(bucketed), batch_size=None, num_workers=workers, collate_fn=dict)
    epochs = [list(loader) for _ in range(4)]
    for samples in epochs:
        assert counted(samples) == {"all of a": 12, "two of b": 6, "@.": 18}
        keys = [sample["__key__"] for sample in samples if sample["__dataset__"] == "two of b"]
        assert len(set(keys)) == len(keys)
    assert len({tuple(sorted(keys_of(samples))) for samples in epochs}) > 1
