"""WebDataset(): the usual graph in one call."""

import inspect
import pickle
import re
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from tests.kits.shards import image_samples, text_keys, write_tar, write_text_shards
from torchdata_wds import (
    MissingFieldError,
    ShardListError,
    ShardLoader,
    ShardOpenError,
    UnsafeDataError,
    WdsPipe,
    WebDataset,
    handle_extension,
    ignore_and_continue,
    wds_collate,
)
from torchdata_wds.consumers import upstream
from torchdata_wds.storage.places import RewriteRules

SIZES = (4, 0, 9, 3, 5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five text shards of uneven length."""
    return write_text_shards(tmp_path_factory.mktemp("dataset"), SIZES)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two shards of three samples: jpg, json, cls."""
    folder = tmp_path_factory.mktemp("images")
    return [write_tar(folder / f"{number}.tar", image_samples(f"i{number}-", 3)) for number in range(2)]


def keys(pipe: IterDataPipe[Any]) -> list[str]:
    return [sample["__key__"] for sample in pipe]


def types(pipe: IterDataPipe[Any]) -> list[str]:
    """The pipes of a chain, first to last."""
    found: list[str] = []
    graph = traverse_dps(pipe)
    while graph:
        ((one, graph),) = graph.values()
        found.insert(0, type(one).__name__.removesuffix("IterDataPipe"))
    return found


def test_webdataset_gives_every_sample_as_bytes_when_only_urls_are_given(shards: list[str]) -> None:
    """Nothing is decoded unless a decoder is given."""
    pipe = WebDataset(shards)
    samples = list(pipe)
    assert sorted(sample["__key__"] for sample in samples) == sorted(text_keys(SIZES))
    assert {type(sample["cls"]) for sample in samples} == {bytes}
    assert isinstance(pipe, WdsPipe)


def test_webdataset_takes_urls_in_every_form_when_called(shards: list[str]) -> None:
    """A pattern, a path, lists, tuples, generators, nested lists and pipes."""
    folder = Path(shards[0]).parent
    for urls in (
        str(folder / "shard-{000000..000004}.tar"), str(folder / "*.tar"), folder, shards, tuple(shards),
        (url for url in shards), [shards[:2], shards[2:]], map(Path, shards), "::".join(shards),
        IterableWrapper([folder]),
    ):  # fmt: skip
        pipe = WebDataset(urls, shardshuffle=False)
        assert keys(pipe) == text_keys(SIZES)
        assert keys(pipe) == text_keys(SIZES)


@pytest.mark.parametrize("urls", [[], (), iter([])])
def test_webdataset_raises_when_there_is_no_shard(urls: Any) -> None:
    """An empty list is what a glob that matched nothing gives: an empty epoch would hide it."""
    with pytest.raises(ShardListError, match="empty list"):
        WebDataset(urls)


def test_webdataset_opens_nothing_when_constructed() -> None:
    """A missing shard is seen by the first epoch, and goes to the handler."""
    pipe = WebDataset("missing.tar")
    with pytest.raises(ShardOpenError, match=r"missing\.tar"):
        list(pipe)
    assert list(WebDataset("missing.tar", handler=ignore_and_continue)) == []


def test_webdataset_builds_the_whole_graph_when_everything_is_given(images: list[str]) -> None:
    """Shards are shuffled before they are split; samples are shuffled as bytes, before they are decoded."""
    pipe = WebDataset(images, True, "jpg;png cls", "pil", [None, str], 100, ignore_and_continue)
    assert types(pipe) == [
        "IterableWrapper", "ShardLister", "Shuffler", "ShardingFilter", "ShardLoader", "KeyGrouper",
        "SampleShuffler", "SampleDecoder", "FieldTupler", "TupleMapper",
    ]  # fmt: skip
    rows = list(pipe)
    assert sorted(label for _, label in rows) == sorted("012012")
    assert {type(image).__mro__[-2] for image, _ in rows} == {Image.Image}


def test_webdataset_leaves_stages_out_when_they_are_not_asked_for(images: list[str]) -> None:
    """The sharding filter is there in any case, once."""
    for options, absent in [
        ({}, {"SampleShuffler", "SampleDecoder", "FieldTupler", "TupleMapper"}),
        ({"shardshuffle": False}, {"Shuffler"}),
        ({"shardshuffle": 0}, {"Shuffler"}),
        ({"shardshuffle": None}, {"Shuffler"}),
        ({"shuffle": 0}, {"SampleShuffler"}),
        ({"decoder": []}, {"SampleShuffler", "FieldTupler", "TupleMapper"}),
    ]:
        found = types(WebDataset(images, **options))
        assert not absent & set(found)
        assert found.count("ShardingFilter") == 1


def test_webdataset_shuffles_shards_anew_each_epoch_when_asked(shards: list[str]) -> None:
    """A number is the size of the shards' buffer."""
    torch.manual_seed(0)
    for shardshuffle in (True, 100):
        pipe = WebDataset(shards, shardshuffle)
        orders = {tuple(keys(pipe)) for _ in range(6)}
        assert len(orders) > 2
        assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(text_keys(SIZES)))}


def test_webdataset_shuffles_samples_when_asked(shards: list[str]) -> None:
    """`shuffle` is the size of the samples' buffer."""
    order = keys(WebDataset(shards, shardshuffle=False, shuffle=50))
    assert sorted(order) == sorted(text_keys(SIZES))
    assert order != text_keys(SIZES)


@pytest.mark.parametrize("extensions", ["jpg;png cls", ["jpg;png", "cls"], ("jpg", "cls"), [["png", "jpg"], "cls"]])
def test_webdataset_gives_tuples_when_extensions_are_given(images: list[str], extensions: Any) -> None:
    """One str with blanks, or a list of specs."""
    rows = list(WebDataset(images, False, extensions))
    assert [label for _, label in rows] == [b"0", b"1", b"2"] * 2
    assert {image[:2] for image, _ in rows} == {b"\xff\xd8"}


def test_webdataset_decodes_when_a_decoder_is_given(images: list[str]) -> None:
    """One decoder or a list of them; an empty list decodes all but images."""
    for decoder, image, label in [
        (None, bytes, bytes),
        ([], bytes, int),
        ("pil", Image.Image, int),
        (["torchrgb"], torch.Tensor, int),
        (handle_extension("jpg", len), int, int),
        ((handle_extension("cls", bytes.decode), "pil"), Image.Image, str),
    ]:
        for row in WebDataset(images, extensions="jpg cls", decoder=decoder):
            assert isinstance(row[0], image)
            assert isinstance(row[1], label)


def test_webdataset_maps_tuples_when_transforms_are_given(images: list[str]) -> None:
    """A function per place; a single function is for the first."""
    for transforms, expected in [
        ([None, int], (bytes, int)),
        ([len], (int, bytes)),
        (len, (int, bytes)),
        ((len, int), (int, int)),
        ([], (bytes, bytes)),
    ]:
        rows = list(WebDataset(images, extensions="jpg cls", transforms=transforms))
        assert len(rows) == 6
        assert {tuple(map(type, row)) for row in rows} == {expected}


def test_webdataset_raises_when_an_argument_is_wrong() -> None:
    """All before the first shard is read; options of a cache are so without one."""
    for options, error in [
        ({"transforms": [int]}, ValueError),
        ({"extensions": ""}, ValueError),
        ({"extensions": []}, ValueError),
        ({"extensions": [3]}, ValueError),
        ({"decoder": "rbg"}, ValueError),
        ({"decoder": [3]}, TypeError),
        ({"extensions": "cls", "transforms": ["int"]}, TypeError),
        ({"shuffle": -1}, ValueError),
        ({"shuffle": True}, ValueError),
        ({"shardshuffle": -1}, ValueError),
        ({"shardshuffle": "yes"}, ValueError),
        ({"shardshuffle": 10.5}, ValueError),
        ({"handler": "warn_and_continue", "decoder": "pil"}, TypeError),
        ({"cache_name": "basename"}, ValueError),
        ({"cache_size": 100}, ValueError),
        ({"cache_dir": ""}, ValueError),
        ({"cache_dir": "c", "cache_size": 0}, ValueError),
        ({"cache_dir": "c", "cache_size": "1GB"}, TypeError),
        ({"cache_dir": "c", "cache_name": "url"}, ValueError),
    ]:
        with pytest.raises(error):
            WebDataset("x.tar", **options)


def test_webdataset_gives_its_handler_to_every_stage(tmp_path: Path) -> None:
    """A missing shard, a doubled field, one that does not decode and a failing function cost one item each."""
    members = [("a.txt", b"\xff"), ("a.cls", b"1"), ("b.txt", b"b"), ("c.cls", b"x"), ("c.txt", b"c")]
    members += [("d.cls", b"4"), ("d.txt", b"d"), ("e.cls", b"0"), ("e.txt", b"e"), ("f.cls", b"1"), ("f.cls", b"1")]
    bad = write_tar(tmp_path / "bad.tar", members)
    pipe = WebDataset(
        [str(tmp_path / "missing.tar"), bad],
        extensions="__key__ cls",
        decoder=[],
        transforms=[None, (1).__truediv__],
        handler=ignore_and_continue,
    )
    assert list(pipe) == [("d", 0.25)]
    with pytest.raises(MissingFieldError):
        list(WebDataset(bad, extensions="jpg"))


def test_webdataset_takes_further_stages_when_chained(images: list[str]) -> None:
    """The result is a pipe like any other: ours and the native ones follow."""
    pipe = WebDataset(images, shardshuffle=False).wds_shuffle(10).wds_decode("torchrgb8").wds_to_tuple("jpg", "cls")
    batches = list(pipe.batch(4).collate(wds_collate))
    assert [tuple(image.shape) for image, _ in batches] == [(4, 3, 12, 16), (2, 3, 12, 16)]
    assert sorted(label for _, labels in batches for label in labels.tolist()) == [0, 0, 1, 1, 2, 2]


def with_worker(sample: dict[str, Any]) -> tuple[int, str]:
    info = torch.utils.data.get_worker_info()
    return (-1 if info is None else info.id), sample["__key__"]


def test_webdataset_splits_shards_when_a_dataloader_has_two_workers(shards: list[str]) -> None:
    """Each key comes once per epoch, both workers work, and epochs differ."""
    loader = DataLoader(
        WebDataset(shards, shuffle=10).wds_map(with_worker), batch_size=None, num_workers=2, collate_fn=tuple
    )
    epochs = [list(loader) for _ in range(2)]
    for rows in epochs:
        assert sorted(key for _, key in rows) == sorted(text_keys(SIZES))
        assert {worker for worker, _ in rows} == {0, 1}
    assert epochs[0] != epochs[1]


def test_webdataset_draws_shards_without_end_when_resampled(shards: list[str]) -> None:
    """Every shard comes again and again, whole, in draws that follow torch.manual_seed."""
    torch.manual_seed(0)
    samples = list(islice(WebDataset(shards, resampled=True), 2000))
    found = Counter(sample["__key__"] for sample in samples)
    assert set(found) == set(text_keys(SIZES))
    assert min(found.values()) > 60
    assert all(set(sample) == {"__key__", "__url__", "txt", "json", "cls"} for sample in samples)
    torch.manual_seed(0)
    again = WebDataset(shards, resampled=True)
    assert [sample["__key__"] for sample in islice(again, 50)] == [sample["__key__"] for sample in samples[:50]]
    assert [sample["__key__"] for sample in islice(again, 50)] != [sample["__key__"] for sample in samples[:50]]


def test_webdataset_resamples_instead_of_shuffling_and_splitting_when_told(images: list[str]) -> None:
    """The drawing of shards makes their shuffle and the filter needless; all other stages are there as ever."""
    for shardshuffle in [True, False, 100, None]:
        pipe = WebDataset(images, shardshuffle, "jpg;png cls", "pil", [None, str], 100, resampled=True)
        assert types(pipe) == [
            "IterableWrapper", "ShardLister", "ShardingFilter", "ShardResampler", "ShardLoader", "KeyGrouper",
            "SampleShuffler", "SampleDecoder", "FieldTupler", "TupleMapper",
        ]  # fmt: skip
        assert {label for _, label in islice(pipe, 100)} == set("012")


@pytest.mark.parametrize("resampled", [1, None, "yes", 100])
def test_webdataset_raises_when_resampled_is_no_flag(resampled: Any) -> None:
    """True or False, and by its name only: the eighth place is not taken."""
    with pytest.raises(TypeError, match="resampled must be True or False"):
        WebDataset("x.tar", resampled=resampled)
    with pytest.raises(TypeError, match="positional"):
        WebDataset("x.tar", True, None, None, None, None, ignore_and_continue, True)


def test_webdataset_draws_differently_in_each_worker_when_resampled(shards: list[str]) -> None:
    """Two workers read other shards, each from the whole list, where torch gives both the same seed."""
    pipe = WebDataset(shards, resampled=True).wds_map(with_worker)
    rows = list(islice(DataLoader(pipe, batch_size=None, num_workers=2, collate_fn=tuple), 400))
    first, second = ([key for worker, key in rows if worker == number] for number in range(2))
    assert set(first) == set(second) == set(text_keys(SIZES))
    assert first != second


def test_webdataset_caches_the_shards_of_each_worker_when_it_has_a_cache_dir(shards: list[str]) -> None:
    """Behind the split, before the loader."""
    pipe = WebDataset(shards, cache_dir="cache", cache_name="basename", cache_size=1e9)
    assert types(pipe)[3:6] == ["ShardingFilter", "ShardCacher", "ShardLoader"]
    cacher = pipe.source_datapipe.source_datapipe
    assert (cacher.folder, cacher.name, cacher.max_bytes) == ("cache", "basename", 1e9)
    assert WebDataset(shards, cache_dir="cache", cache_size=-1).source_datapipe.source_datapipe.max_bytes is None
    assert types(WebDataset(shards, resampled=True, cache_dir="cache"))[3:5] == ["ShardResampler", "ShardCacher"]
    assert sorted(keys(pipe)) == sorted(text_keys(SIZES))  # local files are read where they are


# ------------------------------------------------------------------------------- what the stages take, in the one call
def stage(pipe: Any, name: str) -> Any:
    """The one stage of a class in a chain."""
    (found,) = (pipe for pipe in upstream(pipe) if type(pipe).__name__.startswith(name))
    return found


def test_webdataset_gives_the_options_of_stores_to_every_stage_that_opens_something() -> None:
    """Keys of an S3 server and rules for URLs reach the listing, the cache and the loader; no repr shows them."""
    options = {"s3": {"key": "K", "secret": "hunter2", "endpoint_url": "http://127.0.0.1:9"}}
    pipe = WebDataset("s3://b/{0..9}.tar", storage_options=options, rewrite="gs://=s3://", cache_dir="c", cache_size=9)
    for name in ("ShardLister", "ShardCacher", "ShardLoader"):
        found = stage(pipe, name)
        assert found.storage_options["s3"]["secret"] == "hunter2"
        assert found.rewrite == RewriteRules("gs://=s3://")
    assert "hunter2" not in repr(pipe)
    (loader,) = (pipe for pipe in upstream(pickle.loads(pickle.dumps(pipe))) if type(pipe) is ShardLoader)
    assert loader.storage_options["s3"]["key"] == "K"


def test_webdataset_reads_and_decodes_as_told_when_options_of_stages_are_given(tmp_path: Path) -> None:
    """`select`, `rename`, `allow_pickle`, `read_ahead` and `interleave` are those of the loader and the decoder."""
    paths = []
    for name in "ab":
        members = [(f"{name}{number}.{field}", pickle.dumps(number)) for number in range(3) for field in ("pyd", "bin")]
        paths.append(write_tar(tmp_path / f"{name}.tar", members))
    options: dict[str, Any] = {"decoder": [], "allow_pickle": True, "read_ahead": 1, "interleave": 2}
    pipe = WebDataset(paths, False, select=re.compile(r"pyd$").search, rename=lambda name: f"d/{name}", **options)
    found = [(sample["__key__"], sample["pyd"], len(sample)) for sample in pipe]
    assert found == [(f"d/{name}{number}", number, 3) for number in range(3) for name in "ab"]
    with pytest.raises(UnsafeDataError, match="allow_pickle"):
        list(WebDataset(paths, decoder=[]))


# ---------------------------------------------------------------------------------------- webdataset's own arguments
def test_webdataset_takes_every_argument_of_webdatasets() -> None:
    """Each name is in the signature, so that none ends in a bare TypeError."""
    theirs = inspect.signature(webdataset.WebDataset).parameters
    ours = inspect.signature(WebDataset).parameters
    assert set(theirs) <= set(ours)
    documented = str(inspect.getdoc(WebDataset))
    assert all(f"\n    {name}: " in documented for name in ours)


def only_text(name: str) -> bool:
    return name.endswith("txt")


def upper(name: str) -> str:
    return name.upper()


def test_webdataset_builds_the_same_graph_when_arguments_have_webdatasets_names() -> None:
    """Other names for what there is here, and values that ask for what is done anyway."""
    for theirs, ours in [
        ({"mode": "resampled"}, {"resampled": True}),
        ({"mode": None, "repeat": False, "detshuffle": False, "empty_check": False, "seed": None}, {}),
        ({"nodesplitter": webdataset.split_by_node, "workersplitter": webdataset.split_by_worker}, {}),
        ({"nodesplitter": None, "workersplitter": None, "verbose": False}, {}),
        ({"nodesplitter": webdataset.shardlists.single_node_only, "cache_size": -1}, {}),
        ({"select_files": only_text, "rename_files": upper}, {"select": only_text, "rename": upper}),
        ({"cache_dir": "c", "url_to_name": upper, "verbose": True}, {"cache_dir": "c", "cache_name": upper}),
    ]:
        assert repr(WebDataset("x.tar", **theirs)).replace(", verbose=True", "") == repr(WebDataset("x.tar", **ours))


def test_webdataset_names_the_form_when_an_argument_is_not_for_it() -> None:
    """What asks for something else than is done here is never ignored."""
    for options, form in [
        ({"repeat": True}, r"\.cycle\(n\)"),
        ({"repeat": 3}, r"\.wds_epoch\(n\)"),
        ({"detshuffle": True}, r"WorkersReadingService\(n, seed=s\)"),
        ({"seed": 0}, r"torch\.manual_seed"),
        ({"nodesplitter": upper}, r"\.sharding_filter\(\)"),
        ({"workersplitter": True}, r"\.split_shards\(\)"),
        ({"empty_check": True}, "matches nothing raises in any case"),
        ({"mode": "shards"}, "resampled=True"),
        ({"verbose": True}, "cache_dir="),
        ({"url_to_name": upper}, "cache_dir="),
        ({"select": only_text, "select_files": only_text}, "same argument"),
        ({"rename": upper, "rename_files": upper}, "same argument"),
        ({"cache_dir": "c", "cache_name": "path", "url_to_name": upper}, "same argument"),
        ({"allow_pickle": True}, r"decoder="),
    ]:
        with pytest.raises(ValueError, match=form):
            WebDataset("x.tar", **options)


def test_webdataset_says_so_when_the_handler_is_the_second_argument() -> None:
    """As it is in webdataset's constructor."""
    with pytest.raises(TypeError, match="handler= by name"):
        WebDataset("x.tar", ignore_and_continue)  # type: ignore[arg-type]


@pytest.mark.parametrize("urls", [{"datasets": []}, "data.yaml", Path("data.YML"), "https://host/list.json"])
def test_webdataset_names_load_dataset_when_it_gets_a_dataset_file(urls: Any) -> None:
    """Webdataset takes both under one name."""
    with pytest.raises(ShardListError, match="load_dataset"):
        WebDataset(urls)
