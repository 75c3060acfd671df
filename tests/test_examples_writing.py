"""What WebDataset users do when they make shards, as it is done here; and the manual's conversion, in parallel."""

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.kits.shards import image_samples, write_tar
from torchdata_wds import ShardWriter, TarWriter, WebDataset

SIZES = (7, 4, 9)


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    """Three shards of jpg, json and cls."""
    return [
        write_tar(tmp_path / f"train-{shard:06d}.tar", image_samples(f"i{shard}-", size))
        for shard, size in enumerate(SIZES)
    ]


def read(path: Path | str | list[str], **options: Any) -> list[dict[str, Any]]:
    """The samples of shards, in order."""
    return list(WebDataset(path, shardshuffle=False, **options))


def test_tar_writer(tmp_path: Path) -> None:
    """`TarWriter("dest.tar")` with a pickle, a float image, a class and an array."""
    image = np.linspace(0, 1, 48, dtype=np.float32).reshape(4, 4, 3)
    with TarWriter(str(tmp_path / "dest.tar")) as sink:
        for index in range(3):
            sink.write(
                {
                    "__key__": f"sample{index:06d}",
                    "input.pyd": {"a": index},
                    "input.jpg": image,
                    "output.cls": index,
                    "input.npy": np.arange(index),
                }
            )
    for index, raw in enumerate(read(tmp_path / "dest.tar")):
        assert set(raw) == {"__key__", "__url__", "input.pyd", "input.jpg", "output.cls", "input.npy"}
        assert raw["output.cls"] == b"%d" % index
    pipe = WebDataset(tmp_path / "dest.tar", shardshuffle=False).wds_decode("rgb", allow_pickle=True)
    for index, sample in enumerate(pipe):
        assert sample["input.pyd"] == {"a": index}
        assert sample["input.npy"].tolist() == list(range(index))
        assert abs(sample["input.jpg"] - image).mean() < 0.1


def test_tar_writer_of_bytes(sources: list[str], tmp_path: Path) -> None:
    """`encoder=False`: files are put in as they are."""
    with TarWriter(tmp_path / "dest.tar", encoder=False) as sink:
        for sample in read(sources[0]):
            sink.write({"__key__": sample["__key__"], "jpg": sample["jpg"], "cls": sample["cls"]})
    found = read(tmp_path / "dest.tar")
    assert [sample["jpg"] for sample in found] == [sample["jpg"] for sample in read(sources[0])]


def test_records_of_msgpack(tmp_path: Path) -> None:
    """`writer.write(dict(mp=sample))`, and back by `itemgetter("mp")`."""
    records = [{"text": f"t{number}", "values": [number, 0.5]} for number in range(4)]
    with TarWriter(tmp_path / "x.tar") as writer:
        for number, record in enumerate(records):
            writer.write({"__key__": f"{number:06d}", "mp": record})
    assert list(WebDataset(tmp_path / "x.tar").wds_decode().map(itemgetter("mp"))) == records


def process_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """What the processes of a pool do."""
    return {"__key__": sample["__key__"], "png": sample["jpg"].resize((8, 8)), "cls": sample["cls"] + 1}


def test_pool_of_processes_into_a_writer(sources: list[str], tmp_path: Path) -> None:
    """`pool.imap_unordered(process_sample, WebDataset(...))` into a writer that was open before."""
    context = multiprocessing.get_context("fork")
    with ShardWriter(f"{tmp_path}/done-%06d.tar", max_count=8) as writer, context.Pool(2) as pool:
        for sample in pool.imap_unordered(process_sample, WebDataset(sources, decoder="pil")):
            writer.write(sample)
    found = read(f"{tmp_path}/done-*.tar", decoder="pil")
    assert sorted(sample["__key__"] for sample in found) == sorted(sample["__key__"] for sample in read(sources))
    assert {sample["png"].size for sample in found} == {(8, 8)}
    assert [shard.count for shard in writer.shards] == [8, 8, 4]


def augment(image: Image.Image) -> Image.Image:
    """Some augmentation."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


def augment_wds(job: tuple[str, str]) -> str:
    """Reads, transforms and writes one shard."""
    source, target = job
    with TarWriter(target) as writer:
        for sample in WebDataset(source, shardshuffle=False, decoder="pil"):
            for turn in range(2):
                image = sample["jpg"].rotate(90 * turn) if turn else augment(sample["jpg"])
                writer.write({**sample, "__key__": f"{sample['__key__']}-{turn}", "jpg": image})
    return target


def dask_executor() -> AbstractContextManager[Executor]:
    """The executor of a cluster on this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what another package's import says is not ours
        import distributed

    class Cluster:
        def __enter__(self) -> Executor:
            self.cluster = distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
            )
            self.client = distributed.Client(self.cluster)
            executor: Executor = self.client.get_executor()
            return executor

        def __exit__(self, *_: object) -> None:
            self.client.close()
            self.cluster.close()

    return Cluster()


@pytest.mark.parametrize(
    "executor",
    [
        lambda: ThreadPoolExecutor(2),
        lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")),
        pytest.param(
            lambda: ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")), marks=pytest.mark.slow
        ),
        pytest.param(dask_executor, marks=[pytest.mark.slow, pytest.mark.filterwarnings("default")]),
    ],
    ids=["threads", "processes", "spawned processes", "dask.distributed"],
)
def test_augment_wds(
    executor: Callable[[], AbstractContextManager[Executor]], sources: list[str], tmp_path: Path
) -> None:
    """The offline augmentation, shard by shard, on whichever executor: every sample once, in its shard's place."""
    jobs = [(source, source.replace("train", "augmented")) for source in sources]
    with executor() as pool:
        targets = list(pool.map(augment_wds, jobs))
    assert targets == [target for _, target in jobs]
    for source, target in jobs:
        expected = [f"{sample['__key__']}-{turn}" for sample in read(source) for turn in range(2)]
        assert [sample["__key__"] for sample in read(target)] == expected
    assert not list(tmp_path.glob("*.partial"))
