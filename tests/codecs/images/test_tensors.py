"""Image tensors on their way: batches, messages of workers, the sample cache, and image files."""

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import jpeg_bytes, write_tar
from torchdata_wds import WdsLoader, image_decoder, wds_collate
from torchdata_wds.codecs import decode_sample, encode_sample
from torchdata_wds.codecs.stored import decode_value, encode_value

SIZE = (200, 130)  # large enough for shared memory
FILES = [jpeg_bytes(number, SIZE) for number in range(6)]


def images(spec: str = "torchrgb8") -> list[torch.Tensor]:
    return [image_decoder(spec).decode(data) for data in FILES]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("shards") / "a.tar"
    return write_tar(path, [(f"{number}.jpg", data) for number, data in enumerate(FILES)])


def test_batch_of_tensors_is_contiguous_when_stacked() -> None:
    """Both collate functions make NCHW batches in NCHW memory, of any number of images, with the arrays' pixels."""
    arrays = np.stack([image_decoder("rgb8").decode(data) for data in FILES])
    for count in (1, 2, 6):
        for collate in (wds_collate, default_collate):
            batch = collate(images()[:count])
            assert batch.is_contiguous()
            assert np.array_equal(batch.permute(0, 2, 3, 1).numpy(), arrays[:count])


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_tensors_are_equal_when_workers_send_them(url: str, context: str) -> None:
    """Single tensors cross with their memory's order, batches in the order of their shape."""
    source = IterableWrapper([url]).list_shards().sharding_filter().load_wds_shards().group_by_key()
    pipe: Any = source.wds_decode("torchrgb8").wds_to_tuple("jpg")
    assert context in multiprocessing.get_all_start_methods()
    with WdsLoader(pipe, 1, multiprocessing_context=context) as loader:
        for (found,), wanted in zip(loader, images(), strict=True):
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()
    with WdsLoader(pipe.batch(6).collate(wds_collate), 1, multiprocessing_context=context) as loader:
        ((batch,),) = loader
    assert batch.is_contiguous()
    assert torch.equal(batch, torch.stack(images()))


def test_tensors_are_equal_when_stored_or_encoded() -> None:
    """The sample cache keeps them; a png file of one is that of its array, and so is a pth field."""
    for tensor, data in zip(images(), FILES, strict=True):
        assert torch.equal(decode_value(encode_value(tensor).data), tensor)
        array = image_decoder("rgb8").decode(data)
        written = encode_sample({"__key__": "k", "png": tensor, "pth": tensor}, "torchrgb8")
        assert written["png"] == encode_sample({"__key__": "k", "png": array})["png"]
        assert torch.equal(decode_sample(written)["pth"], tensor)
