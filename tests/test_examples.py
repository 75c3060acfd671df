"""What WebDataset users write, as they write it here: one test per example, on shards of generated images."""

import io
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.servers import serve_folder
from tests.kits.shards import image_samples, sample_members, write_tar
from tests.kits.torchdata import DataLoader2, WorkersReadingService
from torchdata_wds import (
    WebDataset,
    handle_extension,
    ignore_and_continue,
    load_dataset,
    reraise_exception,
    warn_and_continue,
    wds_collate,
)

SIZES = (7, 4, 9, 5)
KEYS = [f"i{shard}-{number:05d}" for shard, size in enumerate(SIZES) for number in range(size)]
NUMBERS = [number for size in SIZES for number in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of jpg, json and cls, and beside them shards of png, of npy and of mp."""
    folder = tmp_path_factory.mktemp("examples")
    for shard, size in enumerate(SIZES):
        write_tar(folder / f"d-{shard:03d}.tar", image_samples(f"i{shard}-", size))
    png, npy, mp = [], [], []
    for number in range(5):
        out, arrays = io.BytesIO(), [io.BytesIO(), io.BytesIO()]
        Image.new("RGB", (64, 64), (number, 0, 0)).save(out, "PNG")
        for scale, file in enumerate(arrays):
            np.save(file, np.full(3, number * (scale + 1)))
        png += sample_members(f"p{number}", png=out.getvalue(), cls=str(number).encode())
        npy += [
            (f"n{number}.{name}.npy", file.getvalue()) for name, file in zip(("seq", "target"), arrays, strict=True)
        ]
        mp += sample_members(f"m{number}", mp=msgpack.packb({"number": number, "text": "ä"}))
    for name, members in (("png", png), ("npy", npy), ("mp", mp)):
        write_tar(folder / f"{name}.tar", members)
    return folder


def src(pattern: Any) -> IterDataPipe[Any]:
    """The beginning of every example."""
    return IterableWrapper([pattern]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()


@pytest.fixture
def url(folder: Path) -> str:
    """The four shards of images."""
    return str(folder / "d-{000..003}.tar")


def once(found: list[Any], expected: list[Any] = KEYS) -> bool:
    """Each exactly once, in whatever order."""
    return Counter(found) == Counter(expected)


def skipped(pipe: IterDataPipe[Any]) -> int:
    """How much all pipes of a chain have skipped."""
    total, at = 0, pipe
    while at is not None:
        total += sum(getattr(at, "skipped", {}).values()) if "skipped" in vars(at) else 0
        at = vars(at).get("source_datapipe", vars(at).get("datapipe"))
    return total


def test_shard_list(folder: Path, url: str) -> None:
    """`ShardList("d-{000..003}.tar")`: list_shards yields each URL as a str."""
    assert list(IterableWrapper([url]).list_shards()) == [str(folder / f"d-{shard:03d}.tar") for shard in range(4)]


def test_tarfile_to_samples(url: str) -> None:
    """`SimpleShardList, tarfile_to_samples()`: members grouped by key, as bytes, in order."""
    pipe = IterableWrapper([url]).list_shards().load_wds_shards().group_by_key()
    samples = list(pipe)
    assert [sample["__key__"] for sample in samples] == KEYS
    assert {tuple(sample) for sample in samples} == {("__key__", "__url__", "jpg", "json", "cls")}
    assert skipped(pipe) == 0


def test_split_by_worker_and_node(url: str) -> None:
    """`split_by_worker, split_by_node, shuffle(50)`: shards are shuffled alike everywhere, then split."""
    parts = []
    for place in range(3):
        pipe = IterableWrapper([url]).list_shards().shuffle().set_seed(5).sharding_filter()
        pipe.apply_sharding(3, place)
        parts.append(list(pipe.load_wds_shards().group_by_key().map(itemgetter("__key__"))))
    assert once([key for part in parts for key in part])
    assert all(parts)


def test_shuffle_samples(url: str) -> None:
    """`shuffle(100)`: another order each epoch, each key once."""
    pipe = src(url).wds_shuffle(100).map(itemgetter("__key__"))
    epochs = [list(pipe) for _ in range(2)]
    assert all(map(once, epochs))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("spec", "kind", "shape"),
    [("rgb", np.ndarray, (12, 16, 3)), ("torchrgb", torch.Tensor, (3, 12, 16)), ("pil", Image.Image, (12, 16, 3))],
)
def test_decode_images(url: str, spec: str, kind: type[Any], shape: tuple[int, ...]) -> None:
    """`decode("rgb")`, `decode("torchrgb")`, `decode("pil")`."""
    pipe = src(url).wds_decode(spec)
    samples = list(pipe)
    assert once([sample["__key__"] for sample in samples])
    for sample in samples:
        assert isinstance(sample["jpg"], kind)
        assert (np.shape(np.asarray(sample["jpg"]))) == shape
        assert sample["json"]["number"] % 10 == sample["cls"]
    assert skipped(pipe) == 0


def my_png_decoder(key: str, value: bytes) -> Any:
    if not key.endswith(".png"):
        return None
    with Image.open(io.BytesIO(value)) as image:
        return image.getpixel((0, 0))[0]


@pytest.mark.parametrize("decoder", [my_png_decoder, handle_extension(".png", partial(my_png_decoder, ".png"))])
def test_decode_with_own_decoders(folder: Path, decoder: Callable[..., Any]) -> None:
    """`Decoder(my_png_decoder, ...)` and `handle_extension(".png", f)`: the rest is decoded as ever."""
    rows = list(src(str(folder / "png.tar")).wds_decode(decoder, "pil").wds_to_tuple("png", "cls"))
    assert once(rows, [(number, number) for number in range(5)])


def test_to_tuple(url: str) -> None:
    """`to_tuple("jpg;png", "json")`, `to_tuple("__key__", "jpg;png", "json")`."""
    pipe = src(url).wds_decode("pil").wds_to_tuple("jpg;png", "json")
    assert once([record["number"] for _, record in pipe], NUMBERS)
    assert skipped(pipe) == 0
    rows = list(src(url).wds_to_tuple("__key__", "jpg;png", "json"))
    assert once([key for key, _, _ in rows])
    assert all(json.loads(record)["number"] == int(key[-5:]) for key, _, record in rows)


def preproc(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def nothing_wrong(sample: dict[str, Any]) -> dict[str, Any]:
    return {"number": sample["json"]["number"]}


def test_rename_and_map(url: str) -> None:
    """`rename(image="jpg;png")`, `map_dict(image=f)`, `map(f, handler=...)`, or the native `map`."""
    pipe = src(url).wds_decode("pil").wds_rename(image="jpg;png").wds_map_dict(image=preproc)
    assert {tuple(sample["image"].shape) for sample in pipe} == {(3, 12, 16)}
    mapped = pipe.wds_map(nothing_wrong, handler=warn_and_continue)
    found = list(mapped)
    assert once([sample["__key__"] for sample in found])
    assert once([sample["number"] for sample in found], NUMBERS)
    assert skipped(mapped) == 0
    assert once([sample["number"] for sample in pipe.map(nothing_wrong)], NUMBERS)


def test_map_tuple(url: str) -> None:
    """`to_tuple(...)`, `map_tuple(preproc, None)`."""
    rows = list(src(url).wds_decode("pil").wds_to_tuple("jpg;png", "json").wds_map_tuple(preproc, None))
    assert {tuple(image.shape) for image, _ in rows} == {(3, 12, 16)}
    assert once([record["number"] for _, record in rows], NUMBERS)


def add_noise(source: Iterator[Any], noise: float = 0.01) -> Iterator[Any]:
    for image, label in source:
        yield image + noise * torch.randn_like(image), label


@pytest.mark.parametrize(
    "stage",
    [
        lambda pipe: pipe.wds_compose(add_noise, noise=0.1),
        lambda pipe: pipe.wds_compose(partial(add_noise, noise=0.1)),
        lambda pipe: pipe.wds_compose(add_noise, 0.1),
    ],
)
def test_generator_stage(url: str, stage: Callable[[Any], Any]) -> None:
    """A generator function as a stage: `add_noise`, `partial(add_noise, noise=0.1)`."""
    plain = list(src(url).shuffle(buffer_size=1).wds_decode("torchrgb").wds_to_tuple("jpg", "cls"))
    noisy = list(stage(src(url).wds_decode("torchrgb").wds_to_tuple("jpg", "cls")))
    assert once([label for _, label in noisy], [label for _, label in plain])
    assert 0.05 < torch.stack([image for image, _ in noisy]).std(dim=(2, 3)).mean() < 0.2


def get_patches(source: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for sample in source:
        for number in range(16):
            row, column = random.randrange(64 - 8), random.randrange(64 - 8)
            patch = sample["png"][row : row + 8, column : column + 8]
            yield {"__key__": f"{sample['__key__']}/{number:02d}", "patch": patch, "cls": sample["cls"]}


def test_patches(folder: Path) -> None:
    """`.compose(get_patches)`, then `shuffle(10000)`: 16 crops of each image, in random order."""
    patches = list(src(str(folder / "png.tar")).wds_decode("rgb8").wds_compose(get_patches).wds_shuffle(10000))
    assert once([patch["__key__"] for patch in patches], [f"p{one}/{two:02d}" for one in range(5) for two in range(16)])
    assert all((patch["patch"][..., 0] == patch["cls"]).all() for patch in patches)
    assert [patch["__key__"] for patch in patches] != sorted(patch["__key__"] for patch in patches)


def test_batches_with_dicts_and_strings(url: str) -> None:
    """`batched(20)`: json dicts and strings in the tuples stay lists beside stacked images."""
    pipe = src(url).wds_decode("torchrgb").wds_to_tuple("__key__", "jpg", "json", "cls")
    batches = list(pipe.batch(20).collate(wds_collate))
    assert [len(names) for names, *_ in batches] == [20, 5]
    assert [tuple(images.shape) for _, images, *_ in batches] == [(20, 3, 12, 16), (5, 3, 12, 16)]
    assert once([key for names, *_ in batches for key in names])
    for names, _, records, labels in batches:
        assert [record["number"] for record in records] == [int(key[-5:]) for key in names]
        assert labels.tolist() == [record["number"] % 10 for record in records]


def training_batches(url: str) -> IterDataPipe[Any]:
    """Batches of 4 made in the workers, taken apart, shuffled and batched again in the main process."""
    pipe = src(url).wds_decode("torchrgb8").wds_to_tuple("__key__", "jpg", "cls").batch(4).collate(wds_collate)
    return pipe.join_workers().wds_unbatch().wds_shuffle(500).batch(10).collate(wds_collate)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rebatching(url: str, num_workers: int) -> None:
    """`WebLoader(...).unbatched().shuffle(1000).batched(12)`: batches that mix the samples of all workers."""
    loader = DataLoader2(training_batches(url), reading_service=WorkersReadingService(num_workers))
    epochs = [list(loader) for _ in range(2)]
    loader.shutdown()
    for batches in epochs:
        assert [len(images) for _, images, _ in batches] == [10, 10, 5]
        assert once([key for names, _, _ in batches for key in names])
        assert {key[1] for key in batches[0][0]} > {batches[0][0][0][1]}  # of more than one shard
    assert [names for names, *_ in epochs[0]] != [names for names, *_ in epochs[1]]


def test_torch_dataloader(url: str) -> None:
    """`torch.utils.data.DataLoader(dataset, num_workers=2, batch_size=16)` on the same chain."""
    pipe = src(url).wds_decode("torchrgb").wds_to_tuple("__key__", "jpg", "cls")
    batches = list(DataLoader(pipe, num_workers=2, batch_size=16))
    assert once([key for names, _, _ in batches for key in names])
    assert {tuple(images.shape[1:]) for _, images, _ in batches} == {(3, 12, 16)}
    assert once([label for *_, labels in batches for label in labels.tolist()], [number % 10 for number in NUMBERS])


def test_dataloader2(url: str) -> None:
    """`DataLoader2(pipe, reading_service=WorkersReadingService(4))`."""
    pipe = src(url).wds_decode("torchrgb").wds_to_tuple("__key__", "jpg", "cls").batch(16).collate(wds_collate)
    loader = DataLoader2(pipe, reading_service=WorkersReadingService(4))
    batches = list(loader)
    loader.shutdown()
    assert once([key for names, _, _ in batches for key in names])


def test_webdataset_chain(url: str) -> None:
    """`WebDataset(url, shardshuffle=True).shuffle(1000).decode("pil").to_tuple(...)`."""
    pipe = WebDataset(url, shardshuffle=True).wds_shuffle(1000).wds_decode("pil").wds_to_tuple("jpg;png", "json")
    assert once([record["number"] for _, record in pipe], NUMBERS)
    assert skipped(pipe) == 0


def augment(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def test_webdataset_arguments(url: str) -> None:
    """`WebDataset(url, extensions="jpg cls", decoder="pil", transforms=[augment, f], shuffle=100)`."""
    pipe = WebDataset(url, extensions="jpg cls", decoder="pil", transforms=[augment, str], shuffle=100)
    rows = list(pipe)
    assert once([label for _, label in rows], [str(number % 10) for number in NUMBERS])
    assert {image.size for image, _ in rows} == {(16, 12)}
    assert skipped(pipe) == 0


def npy_decoder(key: str, data: bytes) -> Any:
    return np.load(io.BytesIO(data)) if key.endswith(".npy") else None


def test_resampled_shards(folder: Path, url: str) -> None:
    """`ResampledShards(url)`, `WebDataset(url, resampled=True)`: shards drawn without end, cut into epochs."""
    torch.manual_seed(1)
    drawn = IterableWrapper([url]).list_shards().resample_shards(1000)
    assert {Path(shard).name for shard in drawn} == {f"d-{shard:03d}.tar" for shard in range(4)}
    pipe = WebDataset(url, resampled=True).wds_epoch(100)
    keys = [[sample["__key__"] for sample in pipe] for _ in range(2)]
    assert [len(epoch) for epoch in keys] == [100, 100]
    assert set(keys[0]) | set(keys[1]) == set(KEYS)


def test_with_epoch_and_length(url: str) -> None:
    """`.with_epoch(10000)`, `WebLoader(...).with_epoch(20)`, `.with_length(n)`: over all workers, and going on."""
    pipe = src(url).wds_epoch(20).map(itemgetter("__key__"))
    loader = DataLoader2(pipe, reading_service=WorkersReadingService(2, seed=1))
    epochs = [list(loader) for _ in range(5)]
    loader.shutdown()
    assert [len(epoch) for epoch in epochs] == [20] * 5
    assert set(Counter(key for epoch in epochs for key in epoch)) == set(KEYS)
    assert len(DataLoader(src(url).batch(4).set_length(7), batch_size=None)) == 7


def rescaled(sample: dict[str, Any], scale: float = 1.0, scaleprob: float = 0.0) -> dict[str, Any]:
    """The transformation that the YAML's free keys are for."""
    return {**sample, "scaled": (scale, scaleprob)}


def test_yaml_with_free_keys(folder: Path) -> None:
    """YAML with `dataset:`, `shards`, `scale`, `scaleprob`, `extensions`: free keys go to transforms."""
    text = f"""
dataset:
  - shards: {folder}/d-{{000..001}}.tar
    scale: 0.5
    scaleprob: 0.25
  - shards: {folder}/d-{{002..003}}.tar
    extensions: jpg cls
"""
    (folder / "dataset.yaml").write_text(text)
    samples = list(load_dataset(folder / "dataset.yaml", transforms=rescaled))
    assert once([sample["__key__"] for sample in samples])
    for sample in samples:
        first = sample["__key__"][:2] in ("i0", "i1")
        assert sample["scaled"] == ((0.5, 0.25) if first else (1.0, 0.0))
        assert ("json" in sample) is first


@pytest.mark.parametrize("decoders", [(npy_decoder,), ()])
def test_npy_decoder(folder: Path, decoders: tuple[Any, ...]) -> None:
    """`decode(npy_decoder)` and `to_tuple("seq.npy", "target.npy")`; the table of types would do as well."""
    rows = list(src(str(folder / "npy.tar")).wds_decode(*decoders).wds_to_tuple("seq.npy", "target.npy"))
    assert once([seq.tolist() == [seq[0]] * 3 for seq, _ in rows], [True] * 5)
    assert once([(seq[0], target[0]) for seq, target in rows], [(number, 2 * number) for number in range(5)])


def test_msgpack_records(folder: Path) -> None:
    """`writer.write(dict(mp=sample))`, read back by `map(lambda s: s["mp"])`."""
    records = list(src(str(folder / "mp.tar")).wds_decode().map(itemgetter("mp")))
    assert records == [{"number": number, "text": "ä"} for number in range(5)]


READ_STDIN = """
import torchdata_wds
from torch.utils.data.datapipes.iter import IterableWrapper
pipe = IterableWrapper(["-"]).list_shards().load_wds_shards().group_by_key()
print(*[sample["__key__"] for sample in pipe])
"""


@pytest.mark.slow
def test_standard_input(folder: Path) -> None:
    """`"-"`: the shard comes through a pipe into the program."""
    command = [sys.executable, "-W", "error", "-c", READ_STDIN]
    data = (folder / "d-001.tar").read_bytes()
    done = subprocess.run(command, input=data, capture_output=True, timeout=60, check=False)
    assert done.stdout.decode().split() == KEYS[SIZES[0] :][: SIZES[1]], done.stderr.decode()


@pytest.mark.parametrize("handler", [reraise_exception, ignore_and_continue])
def test_sources(folder: Path, handler: Any) -> None:
    """A path, `file:`, `pipe:cat ...`, `pipe:curl -s -L ...`, `http://` and a file system of fsspec give the same."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for shard in range(4):
        memory.pipe(f"/examples/d-{shard:03d}.tar", (folder / f"d-{shard:03d}.tar").read_bytes())
    with serve_folder(folder) as server:
        for pattern in (
            f"{folder}/d-{{000..003}}.tar",
            f"file:{folder}/d-{{000..003}}.tar",
            f"pipe:cat {folder}/d-{{000..003}}.tar",
            f"pipe:cat {folder}/d-{{000..003}}.tar | gzip",
            f"pipe:curl -s -L {server}/d-{{000..003}}.tar",
            f"{server}/d-{{000..003}}.tar",
            f"{server}/d-{{000..003}}.tar?version=1",
            "memory://examples/d-*.tar",
        ):
            loader = IterableWrapper([pattern]).list_shards().load_wds_shards(handler=handler)
            pipe = loader.group_by_key(handler=handler)
            assert [sample["__key__"] for sample in pipe] == KEYS, pattern
            assert skipped(pipe) == 0


def test_sources_fail_loudly(folder: Path) -> None:
    """What is not there is an error that names it, for every kind of source; the others are read."""
    good = str(folder / "d-000.tar")
    with serve_folder(folder) as server:
        for bad in (
            str(folder / "no.tar"),
            f"pipe:cat {folder}/no.tar",
            f"{server}/no.tar",
            "memory://examples/no.tar",
        ):
            with pytest.raises(OSError, match=r"no\.tar"):
                list(IterableWrapper([bad]).load_wds_shards())
            pipe = IterableWrapper([bad, good]).load_wds_shards(handler=ignore_and_continue)
            assert [sample["__key__"] for sample in pipe.group_by_key()] == KEYS[: SIZES[0]]
            assert skipped(pipe) == 1
