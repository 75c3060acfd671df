"""Random crops under loaders: the same after resuming, others in each epoch, of each sample and in each worker."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import image_file, write_tar
from torchdata_wds import StatefulPipeline, WdsLoader, center_crop_decoder, crop_decoder, handle_extension, index_shard
from torchdata_wds.workers.resume.planner import find_chain

SEED = 5


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Shards of images that are all alike, so that only the crops differ."""
    folder: Path = tmp_path_factory.mktemp("shards")
    pixels = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    image = image_file(Image.fromarray(pixels), "JPEG")
    sizes = enumerate((7, 5, 9, 4))
    shards = [
        write_tar(folder / f"{shard}.tar", [(f"{shard}-{n:02d}.jpg", image) for n in range(size)])
        for shard, size in sizes
    ]
    for shard in shards:
        index_shard(shard)
    return shards


def cropped(pipe: Any) -> Any:
    return pipe.wds_decode(crop_decoder(8, flip=0.5)).wds_to_tuple("__key__", "jpg")


def shuffled(urls: list[str]) -> Any:
    pipe = IterableWrapper([urls]).list_shards().shuffle().sharding_filter().load_wds_shards().group_by_key()
    return cropped(pipe.wds_shuffle(6))


def plain(items: Any) -> list[tuple[str, bytes]]:
    """Items that can be compared."""
    return [(key, image.contiguous().numpy().tobytes()) for key, image in items]


@pytest.mark.parametrize(
    ("workers", "context"),
    [(0, None), *(pytest.param(2, context, marks=pytest.mark.slow) for context in ("fork", "spawn"))],
)
def test_crops_resume_exactly_in_the_middle_of_an_epoch(workers: int, context: Any, urls: list[str]) -> None:
    """What is left has the crops of the run that was not stopped, and so has the next epoch."""
    options: dict[str, Any] = {"seed": SEED, "multiprocessing_context": context}
    with WdsLoader(shuffled(urls), workers, **options) as loader:
        epochs = [plain(loader) for _ in range(3)]
    for cut in (1, 13):
        with WdsLoader(shuffled(urls), workers, **options) as loader:
            plain(loader)
            iterator = iter(loader)
            assert plain(next(iterator) for _ in range(cut)) == epochs[1][:cut]
            state = loader.state_dict()
        with WdsLoader(shuffled(urls), workers, **options) as loader:
            loader.load_state_dict(state)
            assert plain(loader) == epochs[1][cut:]
            assert plain(loader) == epochs[2]
    crops = [dict(epoch) for epoch in epochs]
    assert all(len(set(epoch.values())) > len(epoch) - 3 for epoch in crops)  # samples differ
    assert sum(crops[0][key] == crops[1][key] for key in crops[0]) < 3  # epochs differ


def test_crops_resume_exactly_under_stateful_data_loader(urls: list[str]) -> None:
    """With StatefulPipeline, in two workers and in none."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader(workers: int) -> Any:
        pipe = StatefulPipeline(shuffled(urls), seed=SEED)
        return stateful.StatefulDataLoader(pipe, batch_size=None, num_workers=workers)

    for workers in (0, 2):
        whole = plain(loader(workers))
        stopped = loader(workers)
        iterator = iter(stopped)
        assert plain(next(iterator) for _ in range(11)) == whole[:11]
        resumed = loader(workers)
        resumed.load_state_dict(stopped.state_dict())
        assert plain(resumed) == whole[11:]


@pytest.mark.slow
def test_crops_are_the_same_for_any_number_of_workers_in_a_global_order(urls: list[str]) -> None:
    """They follow from seed, epoch and position."""
    found = []
    for workers in (0, 1, 2):
        with WdsLoader(
            cropped(IterableWrapper([urls]).list_shards().load_in_order(index=True)), workers, seed=SEED
        ) as loader:
            found.append([plain(loader), plain(loader)])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


def test_resume_knows_which_decoder_draws(urls: list[str]) -> None:
    """Before a shuffle, random crops must be made again; crops of the middle are as any decoding."""
    source = IterableWrapper([urls]).list_shards().load_wds_shards().group_by_key()
    random, middle = source.wds_decode(crop_decoder(8)), source.wds_decode(center_crop_decoder(8))
    assert find_chain(random).draws
    assert find_chain(random).obstacle is None
    assert "a function in SampleDecoder, before SampleShuffler" in str(find_chain(random.wds_shuffle(5)).obstacle)
    assert not find_chain(middle).draws
    assert find_chain(middle.wds_shuffle(5)).obstacle is None
    assert find_chain(source.wds_interleaved(images=crop_decoder(8))).draws
    decode = crop_decoder(8).decode
    assert find_chain(source.wds_decode(handle_extension("left.jpg", decode))).draws
    assert find_chain(source.wds_map_dict(jpg=decode)).draws
    assert not find_chain(source.wds_map_dict(jpg=center_crop_decoder(8).decode)).draws


def test_crops_make_batches_in_workers(urls: list[str]) -> None:
    """Tensors of one size, which are stacked."""
    from torchdata_wds import wds_collate

    with WdsLoader(shuffled(urls).batch(5).collate(wds_collate), 2, seed=SEED) as loader:
        batches = [images for _, images in loader]
    assert sum(map(len, batches)) == 25
    assert all(images.shape[1:] == (3, 8, 8) and images.dtype == torch.uint8 for images in batches)
    assert all(images.is_contiguous() for images in batches)
