"""decode_jpegs: the JPEG files of a batch, decoded at once."""

import io
import pickle
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds import DecodingError, WdsLoader, decode_jpegs, image_decoder, warn_and_continue
from torchdata_wds.codecs.images import batches
from torchdata_wds.codecs.options import MissingPackageError
from torchdata_wds.handlers import said


def jpeg(number: int = 0, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """A JPEG file of noise that is smooth enough for its quality."""
    shape = (size[1] // 5, size[0] // 5, len(mode)) if len(mode) > 1 else (size[1] // 5, size[0] // 5)
    pixels = np.random.default_rng(number).integers(0, 256, shape, dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels, mode=mode).resize(size).save(out, options.pop("format", "JPEG"), **options)
    return out.getvalue()


def turned(orientation: int) -> bytes:
    """A JPEG file with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(1, exif=exif)


FILES = {
    "colour": jpeg(1),
    "grey": jpeg(2, "L"),
    "progressive": jpeg(3, progressive=True),
    "small": jpeg(4, size=(10, 15)),
    "CMYK": jpeg(5, "CMYK"),
    "turned": turned(6),
    "upright": turned(1),
    "PNG": jpeg(6, format="PNG"),
    "with more after its end": jpeg(7) + b"more" * 20,
}
#: What a GPU's decoder may get.
ORDINARY = ("colour", "grey", "progressive", "small", "upright")


# ------------------------------------------------------------------------------------------------------ on the CPU
@pytest.mark.parametrize("threads", [1, 3, None])
def test_decode_jpegs_gives_the_tensors_of_image_decoder(threads: int | None) -> None:
    """In their order, of any size and kind, in one thread or several."""
    for mode, spec in (("rgb", "torchrgb8"), ("l", "torchl8")):
        for exif_transpose in (False, True):
            one = image_decoder(spec, exif_transpose=exif_transpose)
            images = decode_jpegs(mode=mode, exif_transpose=exif_transpose, threads=threads)([*FILES.values()])
            assert len(images) == len(FILES)
            for image, data in zip(images, FILES.values(), strict=True):
                assert image.dtype == torch.uint8
                assert torch.equal(image, one.decode(data))


def test_decode_jpegs_takes_bytes_tensors_and_arrays() -> None:
    """Whatever a batch has them in: a collated column of files of one size is a tensor."""
    data = FILES["colour"]
    array = np.frombuffer(data, np.uint8).copy()
    files = [data, bytearray(data), memoryview(data), array, torch.from_numpy(array)]
    for images in (decode_jpegs()(files), decode_jpegs()(tuple(files)), decode_jpegs()(torch.from_numpy(array)[None])):
        assert all(torch.equal(image, image_decoder("torchrgb8").decode(data)) for image in images)
    assert decode_jpegs()([]) == []


def test_decode_jpegs_replaces_the_field_of_a_batch() -> None:
    """A collated dict or tuple, or a list of samples; the batch itself stays as it is."""
    files, labels = [FILES["colour"], FILES["small"]], torch.tensor([1, 2])
    expected = decode_jpegs()(files)
    batch = {"__key__": ["a", "b"], "jpg": files, "cls": labels}
    result = decode_jpegs(field="jpg")(batch)
    assert list(result) == list(batch)
    assert batch["jpg"] is files
    pairs = decode_jpegs(field=0)((files, labels))
    assert type(pairs) is tuple
    samples = decode_jpegs(field="jpg")([{"__key__": "a", "jpg": files[0]}, {"__key__": "b", "jpg": files[1]}])
    assert [sample["__key__"] for sample in samples] == ["a", "b"]
    for images in (result["jpg"], pairs[0], decode_jpegs(field=1)([labels, files])[1], [x["jpg"] for x in samples]):
        assert all(map(torch.equal, images, expected))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_decode_jpegs_runs_behind_the_workers(method: str) -> None:
    """The workers pass bytes on, the main process decodes them."""
    samples = [{"__key__": str(number), "jpg": jpeg(number)} for number in range(8)]
    pipe = IterableWrapper(samples).sharding_filter().batch(2).join_workers().map(decode_jpegs(field="jpg"))
    with WdsLoader(pipe, 2, multiprocessing_context=method) as loader:
        found = {sample["__key__"]: sample["jpg"] for batch in loader for sample in batch}
    assert len(found) == 8
    for sample in samples:
        assert torch.equal(found[str(sample["__key__"])], image_decoder("torchrgb8").decode(sample["jpg"]))


@pytest.mark.parametrize("threads", [1, 4])
def test_decode_jpegs_names_the_file_that_is_not_an_image(threads: int) -> None:
    """By its place and its key; the first one, if there are several."""
    files = [FILES["colour"], FILES["PNG"], b"no image", b"", FILES["colour"][:300]]
    with pytest.raises(
        DecodingError, match=r"^image 2 of a batch, of sample 'c', does not decode: Unidentified"
    ) as caught:
        decode_jpegs(field="jpg", threads=threads)({"__key__": list("abcde"), "jpg": files})
    assert (caught.value.key, caught.value.field) == ("c", "jpg")
    with pytest.raises(DecodingError, match=r"^image 0 of a batch does not decode: .*\. It is empty\. Repair"):
        decode_jpegs(threads=threads)(files[3:])
    with pytest.raises(DecodingError, match="of sample 'x', does not decode: OSError"):
        decode_jpegs(field="jpg")([{"__key__": "x", "jpg": files[4]}])


def test_decode_jpegs_leaves_a_batch_to_the_handler() -> None:
    """As the stages that decode samples do."""
    batches_ = [{"jpg": [FILES["colour"]]}, {"jpg": [b"no image"]}, {"jpg": [FILES["grey"]]}]
    pipe = IterableWrapper(batches_).wds_map(decode_jpegs(field="jpg"), handler=warn_and_continue)
    assert [len(batch["jpg"]) for batch in pipe] == [1, 1]
    assert dict(pipe.skipped) == {"DecodingError": 1}


def test_decode_jpegs_refuses_a_batch_without_files() -> None:
    """It says what it met instead."""
    data = FILES["colour"]
    for decoder, batch, error, words in [
        (decode_jpegs(), data, TypeError, "takes a list of files"),
        (decode_jpegs(), {"jpg": [data]}, TypeError, "field= names theirs"),
        (decode_jpegs(), ["a.jpg"], TypeError, "as bytes, or as uint8 tensors .* item 0 is of type str"),
        (decode_jpegs(), [data, torch.zeros(3)], TypeError, "item 1 is of type torch.Tensor"),
        (decode_jpegs(field="jpg"), {"png": [data]}, ValueError, "field='jpg'.* meets a batch without it"),
        (decode_jpegs(field=3), ([data], [1]), ValueError, "field=3.* meets a batch without it"),
        (decode_jpegs(field="jpg"), [data], TypeError, "takes batches with such a field"),
        (decode_jpegs(field="jpg"), ([data], [1]), TypeError, "takes batches with such a field"),
    ]:
        with pytest.raises(error, match=words):
            decoder(batch)


def test_decode_jpegs_refuses_an_option_when_it_makes_no_sense() -> None:
    """When the decoder is made."""
    for options, error, words in [
        ({"device": "graphics"}, ValueError, "device must be one of torch's, .* not 'graphics'"),
        ({"mode": "rgba"}, ValueError, "mode must be one of 'rgb', 'l'"),
        ({"field": True}, TypeError, "field must be a field's name"),
        ({"field": 1.5}, TypeError, "field must be a field's name"),
        ({"exif_transpose": 1}, TypeError, "exif_transpose must be True or False"),
        ({"threads": 0}, ValueError, "threads must be at least 1"),
    ]:
        with pytest.raises(error, match=words):
            decode_jpegs(**options)


def test_decode_jpegs_pickles() -> None:
    """It goes into graphs, which are pickled; its repr is how it is written."""
    decoder = pickle.loads(pickle.dumps(decode_jpegs("cuda:1", field="jpg", threads=2)))
    assert (decoder.device, decoder.field, decoder.threads) == (torch.device("cuda:1"), "jpg", 2)
    assert repr(decoder) == "decode_jpegs('cuda:1', field='jpg', threads=2)"


# ------------------------------------------------------------------------------------------------------- on a GPU
class FakeGpu:
    """A module in the place of torchvision.io, which decodes on the CPU and keeps what it got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str = "torchvision.io") -> None:
        self.calls: list[tuple[list[torch.Tensor], Any, Any]] = []
        self.error: Exception | None = None
        self.refused: list[bytes] = []
        modes = {"RGB": "mode of colour", "GRAY": "mode of grey"}
        fake = SimpleNamespace(decode_jpeg=self.decode, ImageReadMode=modes)
        for name in ("torchcodec.decoders", "torchvision.io"):
            monkeypatch.setitem(sys.modules, name, fake if name == module else None)
            monkeypatch.setitem(sys.modules, name.partition(".")[0], SimpleNamespace())
        monkeypatch.setattr(batches, "_GPUS", {"cpu"})
        batches._gpu_decoder.cache_clear()

    def decode(self, files: list[torch.Tensor], *, mode: Any, device: Any) -> list[torch.Tensor]:
        self.calls.append((files, mode, device))
        if self.error is not None:
            raise self.error
        if any(file.numpy().tobytes() in self.refused for file in files):
            raise RuntimeError("nvjpegDecode failed: 4")
        spec = "torchrgb8" if mode == "mode of colour" else "torchl8"
        return [255 - image_decoder(spec).decode(file.numpy().tobytes()) for file in files]


@pytest.fixture(params=["torchcodec.decoders", "torchvision.io"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A fake of each package; its images are inverted, so that they are known from the CPU's."""
    said.discard("decode_jpegs")
    yield FakeGpu(monkeypatch, request.param)
    batches._gpu_decoder.cache_clear()
    said.discard("decode_jpegs")


def test_gpu_gets_the_ordinary_files_of_a_batch_at_once(gpu: FakeGpu) -> None:
    """All others are decoded on the CPU, and the order is kept."""
    for mode, spec, name in (("rgb", "torchrgb8", "mode of colour"), ("l", "torchl8", "mode of grey")):
        images = decode_jpegs("cpu", mode=mode)([*FILES.values()])
        files, given, device = gpu.calls.pop()
        assert not gpu.calls
        assert (given, device) == (name, torch.device("cpu"))
        assert [file.numpy().tobytes() for file in files] == [FILES[name] for name in ORDINARY]
        assert all(file.dtype == torch.uint8 and file.ndim == 1 for file in files)
        for image, (name, data) in zip(images, FILES.items(), strict=True):
            expected = image_decoder(spec).decode(data)
            assert torch.equal(image, 255 - expected if name in ORDINARY else expected), name


def test_gpu_is_not_asked_when_no_file_is_for_it(gpu: FakeGpu) -> None:
    """Decoders refuse empty lists."""
    assert len(decode_jpegs("cpu")([FILES["PNG"], FILES["CMYK"]])) == 2
    assert decode_jpegs("cpu")([]) == []
    assert not gpu.calls


def test_gpu_leaves_files_to_the_cpu_that_are_to_be_turned(gpu: FakeGpu) -> None:
    """One package cannot, the other always does."""
    for exif_transpose in (False, True):
        image = decode_jpegs("cpu", exif_transpose=exif_transpose)([FILES["turned"]])[0]
        assert tuple(image.shape) == ((3, 40, 30) if exif_transpose else (3, 30, 40))
    assert not gpu.calls


def test_gpu_has_the_errors_of_the_cpu_when_a_file_is_damaged(gpu: FakeGpu) -> None:
    """Whether it is seen before or by the decoder."""
    for data in (b"no image", FILES["colour"][:300], FILES["colour"][:-2]):
        with pytest.raises(DecodingError, match=r"^image 1 of a batch does not decode"):
            decode_jpegs("cpu")([FILES["colour"], data])


def test_gpu_leaves_a_file_to_the_cpu_when_it_refuses_it(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    """With one warning; the others of its batch are still the GPU's."""
    gpu.refused = [FILES["progressive"]]
    expected = [image_decoder("torchrgb8").decode(FILES[name]) for name in ("colour", "progressive", "small")]
    for _ in range(3):
        images = decode_jpegs("cpu")([FILES[name] for name in ("colour", "progressive", "small")])
        assert all(map(torch.equal, images, [255 - expected[0], expected[1], 255 - expected[2]]))
    assert torch.equal(decode_jpegs("cpu")(gpu.refused)[0], expected[1])
    assert [record.getMessage().partition("(")[0] for record in caplog.records] == [
        "the decoder of device cpu refused an image "
    ]


def test_gpu_raises_when_it_refuses_all_files(gpu: FakeGpu) -> None:
    """Its package is not whole, say; but files that the CPU refuses, too, are to blame."""
    gpu.refused = [FILES["colour"], FILES["grey"], damaged := FILES["colour"][:300] + b"\xff\xd9"]
    with pytest.raises(RuntimeError, match="nvjpegDecode failed"):
        decode_jpegs("cpu")([FILES["colour"], FILES["grey"]])
    with pytest.raises(DecodingError, match=r"^image 1 of a batch does not decode"):
        decode_jpegs("cpu")([FILES["colour"], damaged])


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError("2 GiB"), RuntimeError("CUDA error: no kernel image")])
def test_gpu_raises_when_the_failure_is_its_own(gpu: FakeGpu, error: Exception) -> None:
    """The CPU would only hide it, at a tenth of the speed."""
    gpu.error = error
    with pytest.raises(RuntimeError, match=str(error)):
        decode_jpegs("cpu")([FILES["colour"]])


def test_gpu_needs_one_of_two_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """It never decodes on the CPU without a word."""
    FakeGpu(monkeypatch, "neither")
    with pytest.raises(MissingPackageError, match=r"needs torchcodec .* or torchvision.*pip install torchvision"):
        decode_jpegs("cpu")([FILES["colour"]])
