"""Decoding as a stage: what the codecs do is tested with them, here the pipe around them."""

import gzip
import io
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset.filters
from PIL import Image
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph import traverse_dps

from tests.kits.shards import jpeg_bytes, write_tar
from torchdata_wds import DecodingError, UnsafeDataError, handle_extension, image_decoder


def sample(key: str, **fields: bytes) -> dict[str, Any]:
    return {"__key__": key, "__url__": "x.tar", **fields}


GOOD = sample("a", txt="ä".encode(), cls=b"7", json=json.dumps({"n": [1]}).encode(), jpg=jpeg_bytes(1), bin=b"\x00")
BAD = sample("b", txt=b"\xff", cls=b"7")


def decoded(*arguments: Any, of: Any = GOOD, **options: Any) -> dict[str, Any]:
    (result,) = IterableWrapper([of]).wds_decode(*arguments, **options)
    return result


def test_wds_decode_equals_webdataset_when_no_image_spec_is_given() -> None:
    """Text, numbers and json are decoded; images and unknown fields stay bytes; order and metadata are kept."""
    theirs = next(iter(webdataset.filters.decode()(iter([dict(GOOD)]))))
    ours = decoded()
    assert ours == theirs == {**GOOD, "txt": "ä", "cls": 7, "json": {"n": [1]}}
    assert list(ours) == list(GOOD)


@pytest.mark.parametrize("spec", ["pil", "pill", "pilrgb", "rgb", "rgb8", "l", "l8", "torch", "torchrgb", "torchrgb8"])
def test_wds_decode_equals_webdataset_when_an_image_spec_is_given(spec: str) -> None:
    """The same spec gives the same type, dtype, shape and values."""
    theirs = next(iter(webdataset.filters.decode(spec)(iter([dict(GOOD)]))))["jpg"]
    ours = decoded(spec)["jpg"]
    assert isinstance(ours, Image.Image) == isinstance(theirs, Image.Image)
    if isinstance(theirs, Image.Image):
        assert ours.mode == theirs.mode
    assert getattr(ours, "dtype", None) == getattr(theirs, "dtype", None)
    assert np.shape(ours) == np.shape(theirs)
    np.testing.assert_allclose(np.asarray(ours, "f4"), np.asarray(theirs, "f4"), atol=1e-6)


def test_wds_decode_leaves_values_alone_when_they_were_decoded_before() -> None:
    """Two stages may follow each other: the second sees what is still bytes."""
    (both,) = IterableWrapper([GOOD]).wds_decode(only="cls").wds_decode("rgb8")
    assert (both["cls"], both["txt"], both["jpg"].shape) == (7, "ä", (12, 16, 3))


def test_wds_decode_leaves_the_source_alone() -> None:
    """It makes new samples."""
    kept = dict(GOOD)
    list(IterableWrapper([kept], deepcopy=False).wds_decode("pil"))
    assert kept == GOOD


@pytest.mark.parametrize("only", ["cls json", ["cls", "json"], ("json", "cls"), "cls;json"])
def test_wds_decode_decodes_the_named_fields_when_only_is_given(only: Any) -> None:
    """The others stay bytes."""
    assert decoded("pil", only=only) == {**GOOD, "cls": 7, "json": {"n": [1]}}


def test_wds_decode_asks_functions_in_order_when_several_are_given() -> None:
    """Each gets the field with a leading dot; the first that gives something wins, then come spec and table."""
    asked: list[str] = []

    def look(key: str, data: bytes) -> Any:
        asked.append(key)
        return "mine" if key == ".txt" else None

    result = decoded(look, handle_extension("txt bin", len), "l8")
    assert (result["txt"], result["bin"], result["cls"], result["jpg"].shape) == ("mine", 1, 7, (12, 16))
    assert asked == [".txt", ".cls", ".json", ".jpg", ".bin"]


def test_wds_decode_takes_an_image_decoder_when_it_has_a_size() -> None:
    """`image_decoder` is a decoder like another."""
    assert max(decoded(image_decoder("rgb8", max_size=8))["jpg"].shape) == 8


def test_wds_decode_turns_images_when_exif_says_so() -> None:
    """exif_transpose=True makes a picture upright; without it, it stays as stored."""
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (16, 12)).save(out, "JPEG", exif=exif)
    turned = sample("a", jpg=out.getvalue())
    assert decoded("pil", of=turned)["jpg"].size == (16, 12)
    assert decoded("pil", of=turned, exif_transpose=True)["jpg"].size == (12, 16)


def test_wds_decode_names_shard_key_field_and_cause_when_a_field_does_not_decode() -> None:
    """The error tells where to look."""
    with pytest.raises(DecodingError) as caught:
        decoded(of=BAD)
    for part in ("x.tar", "'b'", "txt", "utf-8"):
        assert part in str(caught.value)
    assert (caught.value.shard, caught.value.key, caught.value.field) == ("x.tar", "b", "txt")
    assert isinstance(caught.value.__cause__, UnicodeDecodeError)


def test_wds_decode_replaces_bad_text_when_errors_says_so() -> None:
    """`errors` is Python's."""
    assert decoded(of=BAD, errors="replace")["txt"] == "\ufffd"


def test_wds_decode_loads_pickles_only_when_they_are_allowed() -> None:
    """A pickle may run any code; the error says how to allow it."""
    pickled = sample("a", pyd=pickle.dumps([1]))
    with pytest.raises(UnsafeDataError, match="allow_pickle=True"):
        decoded(of=pickled)
    assert decoded(of=pickled, allow_pickle=True)["pyd"] == [1]


def test_wds_decode_takes_lambdas_when_nothing_is_sent_to_another_process() -> None:
    """Graph traversal, which pickles collections, does not meet the functions; forked workers inherit them."""
    pipe: IterDataPipe[Any] = IterableWrapper([GOOD]).wds_decode(lambda key, data: data[:1] if key == ".txt" else None)
    assert traverse_dps(pipe)
    (here,) = pipe
    (there,) = DataLoader(pipe, batch_size=None, num_workers=1, collate_fn=dict, multiprocessing_context="fork")
    assert here == there
    assert here["txt"] == "ä".encode()[:1]


def test_wds_decode_pickles_before_and_after_it_has_decoded() -> None:
    """What it has learnt about fields does not go along."""
    pipe = IterableWrapper([GOOD]).wds_decode("torchrgb8", handle_extension("bin", len), only="jpg bin")
    copies = [pickle.loads(pickle.dumps(pipe))]
    expected = list(pipe)
    copies.append(pickle.loads(pickle.dumps(pipe)))
    for copy in copies:
        (found,) = copy
        assert torch.equal(found["jpg"], expected[0]["jpg"])
        assert (found["bin"], found["cls"]) == (1, b"7")


def test_wds_decode_warns_once_when_only_names_no_field(caplog: pytest.LogCaptureFixture) -> None:
    """A misspelled name leaves everything bytes, and one line says which fields there are."""
    assert decoded(only="jpgg") == GOOD
    assert decoded(only="jpgg") == GOOD
    (record,) = caplog.records
    assert "jpgg" in record.message
    assert "cls" in record.message


def test_wds_decode_is_silent_when_only_names_a_field_by_a_glob(caplog: pytest.LogCaptureFixture) -> None:
    """Globs name fields too, and an empty list names none on purpose."""
    assert decoded(only="c*")["cls"] == 7
    assert decoded(only=[]) == GOOD
    assert not caplog.records


def test_wds_decode_decodes_when_the_samples_are_torchdatas_own(tmp_path: Path) -> None:
    """`.load_from_tar().webdataset()` yields open streams, which are read."""
    write_tar(tmp_path / "x.tar", [("a.cls", b"7"), ("a.txt", b"cat")])
    pipe = IterableWrapper([str(tmp_path / "x.tar")]).open_files("rb").load_from_tar().webdataset().wds_decode()
    (sample,) = pipe
    assert (sample[".cls"], sample[".txt"]) == (7, "cat")


def test_wds_decode_refuses_a_compressed_field_when_it_is_larger_than_the_limit() -> None:
    """max_bytes reaches the decoder."""
    source = IterableWrapper([{"__key__": "a", "txt.gz": gzip.compress(bytes(1000))}])
    assert len(next(iter(source.wds_decode(max_bytes=1000)))["txt.gz"]) == 1000
    with pytest.raises(DecodingError, match="max_bytes=999"):
        list(source.wds_decode(max_bytes=999))
