"""Decoding: images against a bare loop and webdataset, what training needs of them, and fields that cost nothing.

    python benchmarks/decode.py [--quick] [--dali] [--json FILE] [--chart FILE]

Images are decoded with simplejpeg (the [fast] extra) and with Pillow, each in a process of its own; `--decoder` does
only one of them, in this process. The bare loop calls the same decoder, with the same options, on the same bytes: on
bytes in memory, and on those that this package's chain reads. Crops, reduced images, PNG and WebP follow, by single
decoders on files in memory, against plain chains to the same result. `--dali` adds NVIDIA DALI's CPU pipeline with two
threads against two workers of `WorkersReadingService`.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import Contender, compare, finish, parse, run_rounds, timed, timed_from
from peers import import_quietly, read_ours, read_webdataset
from PIL import Image
from report import Report, Row, Table
from shards import Shards, make_jpeg, make_shards
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import WorkersReadingService, center_crop_decoder, crop_decoder, image_decoder, wds_collate
from torchdata_wds.codecs.images.regions import draw_crop
from torchdata_wds.workers.service import DataLoader2

DECODERS = ("simplejpeg", "pillow")
COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "samples/s": "{samples_per_second:,.0f}",
    "ours ÷ it": "{ratio:.2f}",
    "by round": "{lowest:.2f}-{highest:.2f}",
}
OVERHEAD_COLUMNS = {
    "kind": "{kind}",
    "contender": "{contender}",
    "µs/sample": "{microseconds:.2f}",
    "µs over the bare loop": "{over_bare_loop:.2f}",
}
SIZES = (400, 400), (500, 375), (1000, 750)
CROP, RESIZE = 224, 256
WORKERS = 2
AHEAD = 4  # batches that two workers make ahead


def bare_decoder(name: str) -> Callable[[bytes], Any]:
    """What a loop of one's own would call for "rgb8"."""
    if name == "simplejpeg":
        import simplejpeg

        return lambda data: simplejpeg.decode_jpeg(data, "RGB")
    return lambda data: np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def image_rows(name: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one decoder, from memory and from shards."""
    shards = make_shards("images", arguments.folder, quick=arguments.quick)
    decode = bare_decoder(name)
    read = read_ours(shards)
    samples = list(read())
    in_memory = IterableWrapper(samples, deepcopy=False)
    kinds = {
        f"{name}, from memory": {
            "ours": lambda: in_memory.wds_decode("rgb8", only="jpg"),
            "bare loop": lambda: map(decode, [sample["jpg"] for sample in samples]),
        },
        f"{name}, from shards": {
            "ours": lambda: read().wds_decode("rgb8", only="jpg"),
            "reading + bare loop": lambda: (decode(sample["jpg"]) for sample in read()),
        },
    }
    try:
        webdataset = read_webdataset(shards)
    except ImportError:
        pass  # the report says so
    else:
        kinds[f"{name}, from shards"]["webdataset"] = lambda: webdataset().decode("rgb8", only=["jpg"])
    _check_images(kinds[f"{name}, from shards"], decode(samples[0]["jpg"]))
    rows = []
    for kind, epochs in kinds.items():
        contenders = [Contender(contender, partial(timed, epoch)) for contender, epoch in epochs.items()]
        rows += compare(kind, run_rounds(kind, contenders, arguments.rounds))
    return rows


def _check_images(epochs: dict[str, Callable[[], Any]], expected: np.ndarray) -> None:
    """Makes sure that all contenders decode to the same, up to the rounding of other versions of libjpeg."""
    for name, epoch in epochs.items():
        first = next(iter(epoch()))
        image = first if isinstance(first, np.ndarray) else first["jpg"]
        worst = np.abs(image.astype(int) - expected).max()
        if image.shape != expected.shape or worst > 8:
            raise RuntimeError(f"{name} decodes to {image.shape} pixels that differ by up to {worst}")


def decoder_rows(name: str, report: Report, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one decoder, measured in a process of their own."""
    if name == "simplejpeg" and not _is_installed(name):
        report.leave_out("simplejpeg", "not installed, it is in the [fast] extra")
        return []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--decoder", name, "--rounds", str(arguments.rounds)]
        command += ["--folder", str(arguments.folder), "--json", str(result)] + ["--quick"] * arguments.quick
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(result.read_text())["tables"][0]["rows"]


def training_rows(arguments: argparse.Namespace) -> list[Row]:
    """Crops and reduced images for training, and formats other than JPEG."""
    torch.set_num_threads(1)  # as in workers
    kinds: dict[str, dict[str, Callable[[], Any]]] = {}
    for width, height in SIZES:
        files = [make_jpeg(number, width, height, noise=8) for number in range(4 if arguments.quick else 32)]
        whole, size = image_decoder("rgb8").decode, f"{width}x{height}"
        decoders: dict[str, dict[str, Callable[[bytes], Any]]] = {
            f"random crops of {size}": {"crop_decoder": crop_decoder(CROP).decode, "pilrgb, crop, resize": _crop},
            f"middles of {size}": {"center_crop_decoder": center_crop_decoder(CROP).decode, "pilrgb, resize": _middle},
            f"{size}": {f"max_size={CROP}": image_decoder("rgb8", max_size=CROP).decode, "whole": whole},
        }
        for form in ("PNG", "WEBP"):
            decoders[f"{form} of {size}"] = {"ours": whole, "Pillow": bare_decoder("pillow")}
        for kind, contenders in decoders.items():
            data = [_in_format(file, kind.partition(" ")[0]) for file in files]
            kinds[kind] = {name: partial(map, decode, data) for name, decode in contenders.items()}
    rows = []
    for kind, epochs in kinds.items():
        contenders = [Contender(name, partial(timed, epoch)) for name, epoch in epochs.items()]
        rows += compare(kind, run_rounds(kind, contenders, arguments.rounds))
    return rows


def _in_format(jpeg: bytes, form: str) -> bytes:
    if form not in ("PNG", "WEBP"):
        return jpeg
    file = io.BytesIO()
    Image.open(io.BytesIO(jpeg)).save(file, form)
    return file.getvalue()


def _crop(data: bytes) -> torch.Tensor:
    """What torchvision's RandomResizedCrop does to a PIL image."""
    image = image_decoder("pilrgb").decode(data)
    rows, columns = draw_crop(
        (image.height, image.width), (CROP, CROP), (0.08, 1), (3 / 4, 4 / 3), random.Random(len(data))
    )
    box = columns.start, rows.start, columns.start + columns.length, rows.start + rows.length
    return _as_tensor(image.crop(box).resize((CROP, CROP), Image.Resampling.BILINEAR))


def _middle(data: bytes) -> torch.Tensor:
    """What torchvision's Resize and CenterCrop do to a PIL image."""
    image = image_decoder("pilrgb").decode(data)
    factor = RESIZE / min(image.size)
    image = image.resize((int(image.width * factor), int(image.height * factor)), Image.Resampling.BILINEAR)
    left, top = (image.width - CROP) // 2, (image.height - CROP) // 2
    return _as_tensor(image.crop((left, top, left + CROP, top + CROP)))


def _as_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def overhead_rows(arguments: argparse.Namespace) -> list[Row]:
    """What decoding txt, json and cls costs, all from the same source pipe."""
    shards = make_shards("text", arguments.folder, quick=arguments.quick)
    source = IterableWrapper(list(itertools.islice(read_ours(shards)(), 10_000)), deepcopy=False)
    epochs: dict[str, Callable[[], Any]] = {
        "ours": source.wds_decode,
        "bare loop": lambda: _decode_fields(source),
    }
    if _is_installed("webdataset"):
        wds = import_quietly("webdataset")
        epochs["webdataset"] = lambda: wds.DataPipeline(lambda: iter(source), wds.decode())
    contenders = [Contender(name, partial(timed, epoch)) for name, epoch in epochs.items()]
    rows = compare("txt, json, cls", run_rounds("txt, json, cls", contenders, arguments.rounds))
    bare = next(row["microseconds"] for row in rows if row["contender"] == "bare loop")
    for row in rows:
        row["over_bare_loop"] = row["microseconds"] - bare
    return rows


def _decode_fields(samples: Any) -> Iterator[tuple[str, Any, int]]:
    loads = json.loads
    for sample in samples:
        yield sample["txt"].decode(), loads(sample["json"]), int(sample["cls"])


def dali_rows(report: Report, arguments: argparse.Namespace) -> list[Row]:
    """Batches of decoded images: DALI's threads against this package's workers."""
    shards = make_shards("images", arguments.folder, quick=arguments.quick)
    batch = 2 if arguments.quick else 32
    try:
        dali = dali_epoch(shards, batch)
    except ImportError as error:
        report.leave_out("DALI", str(error))
        return []
    with our_loader(shards, batch) as loader:
        contenders = [
            Contender(f"ours, {WORKERS} workers", lambda: timed_from(AHEAD, loader, lambda item: len(item[1]))),
            Contender(f"DALI, {WORKERS} threads", lambda: timed_from(AHEAD, dali(), lambda item: len(item[1]))),
        ]
        for contender in contenders:  # starts the workers and the threads
            contender.run()
        return compare(f"batches of {batch}", run_rounds("dali", contenders, arguments.rounds))


def our_loader(shards: Shards, batch: int) -> DataLoader2:
    """Images decoded and batched in workers."""
    pipe = IterableWrapper([shards.pattern]).list_shards().sharding_filter().load_wds_shards().group_by_key()
    pipe = pipe.wds_decode("rgb8").wds_to_tuple("jpg", "cls").batch(batch).collate(wds_collate)
    return DataLoader2(pipe, reading_service=WorkersReadingService(WORKERS))


def dali_epoch(shards: Shards, batch: int) -> Callable[[], Iterator[tuple[Any, Any]]]:
    """The same by DALI's CPU pipeline, whose reader goes on over the epochs' borders."""
    fn = import_quietly("nvidia.dali.fn")
    pipeline_def = import_quietly("nvidia.dali").pipeline_def

    @pipeline_def(batch_size=batch, num_threads=WORKERS, device_id=None)
    def images_and_labels() -> tuple[Any, Any]:
        paths = [str(path) for path in shards.paths]
        images, labels = fn.readers.webdataset(paths=paths, ext=["jpg", "cls"], missing_component_behavior="error")
        return fn.decoders.image(images, device="cpu"), labels

    pipeline = images_and_labels()
    pipeline.build()

    def epoch() -> Iterator[tuple[Any, Any]]:
        for _ in range(shards.samples // batch):
            images, labels = pipeline.run()
            yield images.as_tensor(), labels

    return epoch


def _is_installed(name: str) -> bool:
    try:
        import_quietly(name)
    except ImportError:
        return False
    return True


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dali", action="store_true", help="compare with NVIDIA DALI, too")
    parser.add_argument("--decoder", choices=DECODERS, help="decode images with this one only")


def main() -> None:
    """Measures images by each decoder, the overhead, and DALI if asked."""
    arguments = parse(__doc__, add=_add_arguments)
    report = Report("decode", quick=arguments.quick)
    if arguments.decoder == "pillow":
        if "simplejpeg" in sys.modules:
            raise RuntimeError("simplejpeg is imported already: the figures would not be Pillow's")
        sys.modules["simplejpeg"] = None  # type: ignore[assignment]  # as if it were not installed
    if arguments.decoder:
        rows = image_rows(arguments.decoder, arguments)
    else:
        rows = [row for name in DECODERS for row in decoder_rows(name, report, arguments)]
    report.tables.append(
        Table("Images to rgb8: medians and ratios of medians", COLUMNS, rows, "samples_per_second", "images/s")
    )
    if not arguments.decoder:
        if not _is_installed("webdataset"):
            report.leave_out("webdataset", "not installed, it is in the [bench] extra")
        title = "Crops, reduced images and other formats, in memory, one thread: medians and ratios of medians"
        report.tables.append(Table(title, COLUMNS, training_rows(arguments), "samples_per_second", "images/s"))
        title = "Fields that cost nothing, all from the same samples in memory: medians"
        report.tables.append(Table(title, OVERHEAD_COLUMNS, overhead_rows(arguments), "microseconds", "µs/sample"))
    if arguments.dali:
        title = f"Batches to rgb8, from the {AHEAD + 1}th batch of an epoch to its last, workers and threads running"
        report.tables.append(Table(title, COLUMNS, dali_rows(report, arguments), "samples_per_second", "images/s"))
    finish(report, arguments)


if __name__ == "__main__":
    main()
