"""The loops that `train.py` compares: batches of uint8 crops of 224x224, half of them mirrored, and their classes.

Each reads the same shards in their order and is written as somebody who knows the library writes it for a CPU: PIL
resizes the crop only, and workers stack batches in shared memory.
"""

from __future__ import annotations

import io
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from peers import import_quietly, read_litdata
from PIL import Image
from shards import Shards
from torch.utils.data import DataLoader, IterDataPipe, default_collate
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from torchdata_wds import WdsLoader, wds_collate

__all__ = ["CONTENDERS", "Loop"]

SIDE = 224
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of RandomResizedCrop

Loop = Callable[[Shards, int, int], Iterable[Any]]  # shards, workers, size of a batch: batches of images and classes
Decode = Callable[[Any], torch.Tensor]


def draw_box(width: int, height: int) -> tuple[int, int, int, int]:
    """The left, top, right and bottom of a crop as RandomResizedCrop draws it."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        aspect = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.randint(0, width - wide), random.randint(0, height - high)
            return left, top, left + wide, top + high
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    return left, top, left + side, top + side


def augment(image: Image.Image) -> torch.Tensor:
    """A crop, as a view whose channels come first."""
    image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=draw_box(*image.size))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def decode_by_pil(data: Any) -> torch.Tensor:
    return augment(Image.open(io.BytesIO(data)).convert("RGB"))


def decoder_by_torchvision() -> Decode:
    torchvision_io, v2 = import_quietly("torchvision.io"), import_quietly("torchvision.transforms.v2")
    transform = v2.Compose([v2.RandomResizedCrop(SIDE, SCALE, RATIO, antialias=True), v2.RandomHorizontalFlip()])

    def decode(data: Any) -> torch.Tensor:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return transform(torchvision_io.decode_jpeg(encoded, torchvision_io.ImageReadMode.RGB))

    return decode


def read_ours(shards: Shards, *decoders: Any) -> IterDataPipe[Any]:
    pipe = IterableWrapper([shards.pattern]).list_shards().sharding_filter().load_wds_shards().group_by_key()
    return pipe.wds_decode(*decoders).wds_to_tuple("jpg", "cls")


def read_crops(shards: Shards) -> IterDataPipe[Any]:
    return read_ours(shards, torchdata_wds.crop_decoder(SIDE, flip=0.5))


def read_whole(shards: Shards) -> IterDataPipe[Any]:
    return read_ours(shards, "pilrgb").wds_map_tuple(augment, None)


def in_our_loader(read: Callable[[Shards], IterDataPipe[Any]], shards: Shards, workers: int, batch: int) -> Any:
    with WdsLoader(read(shards).batch(batch).collate(wds_collate), workers) as loader:
        yield from loader


def ours_in_data_loader(shards: Shards, workers: int, batch: int) -> Any:
    return DataLoader(read_crops(shards).batch(batch).collate(wds_collate), batch_size=None, num_workers=workers)


def webdataset_by_pil(shards: Shards, workers: int, batch: int) -> Any:
    """As most of its users write it: by its own decoder."""
    wds = import_quietly("webdataset")
    dataset = wds.WebDataset(shards.pattern, shardshuffle=False).decode("pil").to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(augment).batched(batch, collation_fn=default_collate)
    return wds.WebLoader(dataset, batch_size=None, num_workers=workers)


def webdataset_by_torchvision(shards: Shards, workers: int, batch: int) -> Any:
    wds = import_quietly("webdataset")
    dataset = wds.WebDataset(shards.pattern, shardshuffle=False).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(decoder_by_torchvision(), int).batched(batch, collation_fn=default_collate)
    return wds.WebLoader(dataset, batch_size=None, num_workers=workers)


def hugging_face(shards: Shards, workers: int, batch: int) -> Any:
    """Its images are PIL's; what `map` returns would be copied to Arrow's format and back."""
    datasets = import_quietly("datasets")
    files = {"train": [str(path) for path in shards.paths]}
    dataset = datasets.load_dataset("webdataset", data_files=files, split="train", streaming=True)
    return DataLoader(dataset, batch, num_workers=workers, collate_fn=stack_augmented)


def stack_augmented(samples: list[dict[str, Any]]) -> Any:
    return default_collate([(augment(sample["jpg"]), sample["cls"]) for sample in samples])


def litdata(make_decode: Callable[[], Decode], shards: Shards, workers: int, batch: int) -> Any:
    """From its own format, to which the samples were converted."""
    decode = make_decode()
    dataset = read_litdata(shards)(transform=lambda sample: (decode(sample["jpg"]), int(bytes(sample["cls"]))))
    loader = import_quietly("litdata").StreamingDataLoader
    # Converting leaves another start method, which would need what can be pickled.
    return loader(dataset, batch_size=batch, num_workers=workers, multiprocessing_context="fork")


def energon(shards: Shards, workers: int, batch: int) -> Any:
    """With the indexes that its own tool wrote. It begins at places of its own, and repeats the shards."""
    lib = import_quietly("megatron.energon")
    prepare_energon(shards)

    class Encoder(lib.DefaultTaskEncoder):
        decoder = lib.SampleDecoder(image_decode="pil")

        @lib.stateless
        def encode_sample(self, sample: Any) -> Any:
            return augment(sample.image), int(sample.label)

        def batch(self, samples: list[Any]) -> Any:
            return default_collate(samples)

    dataset = lib.get_train_dataset(
        shards.paths[0].parent,
        worker_config=lib.WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=batch,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=Encoder(),
    )
    return lib.get_loader(dataset)


def prepare_energon(shards: Shards) -> None:
    folder = shards.paths[0].parent
    if (folder / ".nv-meta" / "dataset.yaml").exists():
        return
    program = "from megatron.energon.cli.main import main; main()"
    options = ["--non-interactive", "--no-progress", "--num-workers", "1", "--split-ratio", "1,0,0"]
    options += ["--sample-type", "ImageClassificationSample", "--field-map", '{"image": "jpg", "label": "cls"}']
    command = [sys.executable, "-c", program, "prepare", *options, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def torchdata_pipes(shards: Shards, workers: int, batch: int) -> Any:
    """torchdata's own pipes."""
    import_quietly("torchdata.datapipes.iter")
    pipe = IterableWrapper([str(path) for path in shards.paths]).sharding_filter()
    pipe = pipe.open_files(mode="rb").load_from_tar().webdataset().map(decode_streams)
    return DataLoader(pipe.batch(batch).collate(default_collate), batch_size=None, num_workers=workers)


def decode_streams(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return decode_by_pil(sample[".jpg"].read()), int(sample[".cls"].read())


def dali(shards: Shards, workers: int, batch: int) -> Any:
    """A thread for each worker; only the part of a JPEG that has the crop is decoded."""
    fn, types = import_quietly("nvidia.dali.fn"), import_quietly("nvidia.dali.types")
    pipeline_def = import_quietly("nvidia.dali").pipeline_def

    @pipeline_def(batch_size=batch, num_threads=workers, device_id=None)
    def images_and_classes() -> tuple[Any, Any]:
        paths = [str(path) for path in shards.paths]
        jpegs, classes = fn.readers.webdataset(
            paths=paths, ext=["jpg", "cls"], missing_component_behavior="error", name="reader"
        )
        images = fn.decoders.image_random_crop(
            jpegs, device="cpu", random_area=list(SCALE), random_aspect_ratio=list(RATIO)
        )
        images = fn.resize(images, size=(SIDE, SIDE), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip()
        return fn.crop_mirror_normalize(images, mirror=mirror, dtype=types.UINT8, output_layout="CHW"), classes

    iterator = import_quietly("nvidia.dali.plugin.pytorch").DALIGenericIterator
    for (outputs,) in iterator([images_and_classes()], ["jpg", "cls"], reader_name="reader"):
        yield outputs["jpg"], outputs["cls"]


CONTENDERS: dict[str, Loop] = {
    "ours": partial(in_our_loader, read_crops),
    "ours, pilrgb": partial(in_our_loader, read_whole),
    "ours in DataLoader": ours_in_data_loader,
    "webdataset, PIL": webdataset_by_pil,
    "webdataset, torchvision": webdataset_by_torchvision,
    "HF datasets, PIL": hugging_face,
    "litdata, PIL": partial(litdata, lambda: decode_by_pil),
    "litdata, torchvision": partial(litdata, decoder_by_torchvision),
    "energon, PIL": energon,
    "torchdata, PIL": torchdata_pipes,
    "DALI": dali,
}
