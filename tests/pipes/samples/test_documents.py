"""wds_interleaved: the four layouts, read from shards and written again, its options, and what is wrong."""

import base64
import io
import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_tar
from torchdata_wds import (
    DecodingError,
    ImageSegment,
    MissingFieldError,
    SampleError,
    TextSegment,
    ignore_and_continue,
    ignore_and_stop,
    image_decoder,
    interleaved_sample,
    wds_collate,
)


def png(number: int) -> bytes:
    """A small image whose colour is its number."""
    out = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


PICTURES = {f"i{number}.png": png(number) for number in range(4)}
TEXTS = ["One.", "Two.", "Three."]
PLACES = {"i0.png": 1, "i1.png": 0, "i2.png": 3, "i3.png": 1}
MATRIX = [[number + column / 10 for column in range(3)] for number in range(4)]
INFOS = [
    {"image_name": name, "matched_text_index": place, "matched_sim": number / 10, "raw_url": f"http://x/{name}"}
    for number, (name, place) in enumerate(PLACES.items())
]
MATCHED = {"text_list": TEXTS, "image_info": INFOS, "similarity_matrix": MATRIX, "url": "http://x"}
ORDER = ["i1.png", "One.", "i0.png", "i3.png", "Two.", "Three.", "i2.png"]
PARALLEL = {
    "images": [name if name in PICTURES else None for name in ORDER],
    "texts": [name if name in TEXTS else None for name in ORDER],
    "metadata": json.dumps([{"raw_url": f"http://x/{name}"} if name in PICTURES else None for name in ORDER]),
    "url": "http://x",
}


def with_base64(names: Iterable[str] = PICTURES) -> dict[str, Any]:
    infos = [
        info | ({"image_base64": base64.b64encode(PICTURES[name]).decode()} if name in names else {})
        for info in INFOS
        if (name := str(info["image_name"]))
    ]
    return MATCHED | {"image_info": infos}


def packed(value: Any) -> bytes:
    return json.dumps(value).encode()


def members(layout: str, key: str) -> list[tuple[str, bytes]]:
    """The members of a document in a layout."""
    if layout == "base64":
        return [(f"{key}.json", packed(with_base64()))]
    value = PARALLEL if layout == "obelics" else MATCHED
    joint = "-" if layout == "dash" else "."
    return [(f"{key}.json", packed(value)), *((f"{key}{joint}{name}", data) for name, data in PICTURES.items())]


LAYOUTS = ["members", "dash", "base64", "obelics"]


def from_shards(*paths: Path) -> Any:
    return IterableWrapper(list(map(str, paths))).load_wds_shards().group_by_key()


def words(document: dict[str, Any]) -> list[str | None]:
    """Texts and names of images in their order."""
    return [segment.text if isinstance(segment, TextSegment) else segment.name for segment in document["segments"]]


def sample(key: str = "a", infos: Any = INFOS, names: Iterable[str] = PICTURES, **more: Any) -> dict[str, Any]:
    """A sample in the layout "members"."""
    pictures = {name: PICTURES[name] for name in names}
    matrix = MATRIX[: len(infos)]
    value = MATCHED | {"image_info": infos, "similarity_matrix": matrix}
    return {"__key__": key, "__url__": "x.tar", "json": value, **pictures, **more}


# ---------------------------------------------------------------------------------------------------- the four layouts
@pytest.mark.parametrize("given", ["auto", "own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wds_interleaved_gives_the_same_segments_when_the_layout_is_another(
    layout: str, given: str, tmp_path: Path
) -> None:
    """Texts and images in their order, with all that the document says."""
    shard = write_tar(tmp_path / "x.tar", [*members(layout, "d/doc"), *members(layout, "d/doc2")])
    documents = list(from_shards(shard).wds_interleaved(layout="auto" if given == "auto" else layout))
    assert [document["__key__"] for document in documents] == ["d/doc", "d/doc2"]
    for document in documents:
        assert list(document) == ["__key__", "__url__", "segments", "similarity_matrix", "metadata"]
        assert document["__url__"] == str(shard)
        assert words(document) == ORDER
        assert document["metadata"] == {"url": "http://x"}
        images = [segment for segment in document["segments"] if isinstance(segment, ImageSegment)]
        assert [image.image for image in images] == [PICTURES[str(image.name)] for image in images]
        assert [image.info for image in images] == [{"raw_url": f"http://x/{image.name}"} for image in images]
        if layout != "obelics":
            assert [image.similarity for image in images] == [0.1, 0.0, 0.3, 0.2]
            assert document["similarity_matrix"] == [MATRIX[number] for number in (1, 0, 3, 2)]
        else:
            assert [image.similarity for image in images] == [None] * 4
            assert document["similarity_matrix"] is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_read_back_equal_when_they_are_written(layout: str, tmp_path: Path) -> None:
    """From any layout to the one that is written, and read once more."""
    first = list(from_shards(write_tar(tmp_path / "x.tar", members(layout, "doc"))).wds_interleaved())
    written = IterableWrapper(first).wds_map(interleaved_sample).save_wds_shards(f"{tmp_path}/y-%d.tar")
    assert len(list(written)) == 1
    (second,) = list(from_shards(tmp_path / "y-0.tar").wds_interleaved(layout="members"))
    for field in ("__key__", "segments", "similarity_matrix", "metadata"):
        assert second[field] == first[0][field]


def test_documents_read_back_equal_when_their_images_are_decoded(tmp_path: Path) -> None:
    """The writers encode arrays by the extension of the image's name."""
    shard = write_tar(tmp_path / "x.tar", members("members", "doc"))
    (first,) = list(from_shards(shard).wds_interleaved(images="rgb8"))
    list(IterableWrapper([first]).wds_map(interleaved_sample).save_wds_shards(f"{tmp_path}/y-%d.tar"))
    (second,) = list(from_shards(tmp_path / "y-0.tar").wds_decode("rgb8").wds_interleaved())
    assert words(first) == words(second)
    for one, two in zip(first["segments"], second["segments"], strict=True):
        if isinstance(one, ImageSegment):
            assert np.array_equal(one.image, two.image)


@pytest.mark.parametrize(
    ("layout", "expected", "unnamed"),
    [("auto", PICTURES["i0.png"], 0), ("base64", PICTURES["i0.png"], 1), ("members", b"own", 0)],
)
def test_wds_interleaved_takes_images_where_its_layout_says_when_they_are_there_twice(
    layout: Any, expected: bytes, unnamed: int
) -> None:
    """In the JSON and as a member; what is in neither place is missing."""
    value = with_base64(["i0.png"]) | {
        "image_info": with_base64(["i0.png"])["image_info"][:1],
        "similarity_matrix": None,
    }
    pipe = IterableWrapper([{"__key__": "a", "json": value, "i0.png": b"own"}]).wds_interleaved(layout=layout)
    (document,) = pipe
    assert [segment.image for segment in document["segments"] if isinstance(segment, ImageSegment)] == [expected]
    assert pipe.skipped["image without a name in its document"] == unnamed


def test_wds_interleaved_takes_decoded_samples_and_bytes(tmp_path: Path) -> None:
    """Behind wds_decode or before it; images= decodes what is bytes still, base64 too."""
    for layout in LAYOUTS:
        shard = write_tar(tmp_path / f"{layout}.tar", members(layout, "doc"))
        for pipe in (
            from_shards(shard).wds_decode("rgb8").wds_interleaved(images="rgb8"),
            from_shards(shard).wds_interleaved(images=image_decoder("rgb8")),
        ):
            (document,) = list(pipe)
            images = [segment.image for segment in document["segments"] if isinstance(segment, ImageSegment)]
            assert [image[0, 0, 0] for image in images] == [1, 0, 3, 2]


def test_wds_interleaved_decides_for_each_document_when_the_layout_is_auto(tmp_path: Path) -> None:
    """A shard may hold all of them, and a document may mix them."""
    mixed = [
        ("mix.json", packed(with_base64(["i0.png"]))),
        ("mix.i1.png", PICTURES["i1.png"]),
        *((f"mix-{name}", PICTURES[name]) for name in ("i2.png", "i3.png")),
    ]
    parts = [member for layout in LAYOUTS for member in members(layout, layout)]
    documents = list(from_shards(write_tar(tmp_path / "x.tar", [*mixed, *parts])).wds_interleaved())
    assert [document["__key__"] for document in documents] == ["mix", *LAYOUTS]
    for document in documents:
        assert words(document) == ORDER
        for segment in document["segments"]:
            assert isinstance(segment, TextSegment) or segment.image == PICTURES[str(segment.name)]


def test_wds_interleaved_takes_sorted_shards_when_images_come_before_their_json(tmp_path: Path) -> None:
    """`tar --sort=name` puts doc-1.jpg before doc.json, and a longer key between a shorter one and its images."""
    parts = sorted([*members("dash", "12"), *members("dash", "12-3"), *members("dash", "12-i1")])
    found = list(from_shards(write_tar(tmp_path / "x.tar", parts)).wds_interleaved())
    documents = {document["__key__"]: document for document in found}
    assert sorted(documents) == ["12", "12-3", "12-i1"]
    assert all(words(document) == ORDER for document in documents.values())


def test_wds_interleaved_takes_upper_case_when_fields_are_not_lower_cased(tmp_path: Path) -> None:
    """.JSON is JSON."""
    shard = write_tar(tmp_path / "x.tar", [("doc.JSON", packed(MATCHED)), *members("members", "doc")[1:]])
    for lowercase in (True, False):
        loaded = IterableWrapper([str(shard)]).load_wds_shards().group_by_key(lowercase=lowercase)
        assert [words(document) for document in loaded.wds_interleaved()] == [ORDER]


def test_wds_interleaved_keeps_shards_apart_when_a_document_ends_with_one(tmp_path: Path) -> None:
    """The images of the next shard belong to no document of this."""
    head, *rest = members("dash", "doc")
    shards = write_tar(tmp_path / "0.tar", [head, *rest[:2]]), write_tar(tmp_path / "1.tar", rest[2:])
    pipe = from_shards(*shards).wds_interleaved(missing="drop_image", handler=ignore_and_continue)
    assert [words(document) for document in pipe] == [["i1.png", "One.", "i0.png", "Two.", "Three."]]
    assert pipe.skipped == {"missing image": 2, "SampleError": 1}


@pytest.mark.parametrize(("layout", "interleave"), [("dash", 2), ("auto", 3), ("dash", 7)])
def test_wds_interleaved_keeps_documents_together_when_shards_are_interleaved(
    layout: Any, interleave: int, tmp_path: Path
) -> None:
    """Samples of several shards come in turn: each shard has an open document of its own, and ends by itself."""
    shards = [
        write_tar(
            tmp_path / f"{shard}.tar", [part for doc in range(count) for part in members("dash", f"{shard}_{doc}")]
        )
        for shard, count in enumerate((3, 1, 2, 4, 1))
    ]
    loaded = IterableWrapper(list(map(str, shards))).load_wds_shards(interleave=interleave).group_by_key()
    pipe = loaded.wds_interleaved(layout=layout)
    documents = list(pipe)
    expected = {f"{shard}_{doc}" for shard, count in enumerate((3, 1, 2, 4, 1)) for doc in range(count)}
    assert sorted(document["__key__"] for document in documents) == sorted(expected)
    assert all(words(document) == ORDER for document in documents)
    assert not pipe.skipped


def is_image_or_document(sample: dict[str, Any]) -> bool:
    return "txt" not in sample


def test_wds_interleaved_ends_no_shard_early_when_samples_between_are_left_out(tmp_path: Path) -> None:
    """The first shard misses its turn just when the second one ends and the third begins."""
    first = members("dash", "a")
    parts = [[first[0], ("b.txt", b"x"), *first[1:]], members("members", "c"), members("members", "d")]
    shards = [str(write_tar(tmp_path / f"{number}.tar", part)) for number, part in enumerate(parts)]
    loaded = IterableWrapper(shards).load_wds_shards(interleave=2).group_by_key().filter(is_image_or_document)
    documents = list(loaded.wds_interleaved())
    assert sorted(document["__key__"] for document in documents) == ["a", "c", "d"]


def test_wds_interleaved_ends_each_shard_when_shards_are_interleaved(tmp_path: Path) -> None:
    """Images that their own shard lacks are missing, whatever the shards beside it hold."""
    shards = [write_tar(tmp_path / f"{number}.tar", members("dash", "doc")[:size]) for number, size in ((0, 3), (1, 5))]
    loaded = IterableWrapper(list(map(str, shards))).load_wds_shards(interleave=2).group_by_key()
    pipe = loaded.wds_interleaved(missing="drop_image")
    found = {document["__url__"]: words(document) for document in pipe}
    assert found == {str(shards[0]): ["i1.png", "One.", "i0.png", "Two.", "Three."], str(shards[1]): ORDER}
    assert pipe.skipped == {"missing image": 2}


# ------------------------------------------------------------------------------------------------------------ options
def test_wds_interleaved_raises_when_an_image_is_missing() -> None:
    """It names the document, the images, and those that are there."""
    with pytest.raises(MissingFieldError) as caught:
        list(IterableWrapper([sample(names=["i0.png", "i2.png"])]).wds_interleaved())
    assert (caught.value.key, caught.value.shard, caught.value.field) == ("a", "x.tar", "i1.png")
    assert "images that are not there: i1.png, i3.png. The images that are there are i0.png, i2.png." in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("missing", "expected", "skipped"),
    [
        ("drop_image", [["One.", "i0.png", "Two.", "Three.", "i2.png"], ORDER], {"missing image": 2}),
        ("skip_sample", [ORDER], {"document with missing images": 1}),
        ("none", [ORDER, ORDER], {}),
    ],
)
def test_wds_interleaved_goes_on_when_missing_says_how(missing: Any, expected: Any, skipped: Any) -> None:
    """What is left out is counted, and the matrix has the rows of what is left."""
    pipe = IterableWrapper([sample(names=["i0.png", "i2.png"]), sample("b")]).wds_interleaved(missing=missing)
    documents = list(pipe)
    assert list(map(words, documents)) == expected
    assert pipe.skipped == skipped
    if missing == "drop_image":
        assert documents[0]["similarity_matrix"] == [MATRIX[0], MATRIX[2]]
    if missing == "none":
        images = [segment for segment in documents[0]["segments"] if isinstance(segment, ImageSegment)]
        assert [image.name for image in images if image.image is None] == ["i1.png", "i3.png"]


@pytest.mark.parametrize(
    ("options", "expected", "skipped"),
    [
        ({"max_images": 2}, ["i1.png", "One.", "i0.png", "Two.", "Three."], {"image above max_images": 2}),
        ({"max_images": 0}, TEXTS, {"image above max_images": 4}),
        ({"max_images": 4, "min_images": 4}, ORDER, {}),
        ({"min_images": 5}, None, {"document with too few images": 1}),
        ({"min_similarity": 0.15}, ["One.", "i3.png", "Two.", "Three.", "i2.png"], {"image below min_similarity": 2}),
        ({"min_similarity": 0.3}, ["One.", "i3.png", "Two.", "Three."], {"image below min_similarity": 3}),
        (
            {"min_similarity": 0.25, "min_images": 2},
            None,
            {"image below min_similarity": 3, "document with too few images": 1},
        ),
        (
            {"min_similarity": 0.05, "max_images": 1},
            ["i1.png", "One.", "Two.", "Three."],
            {"image below min_similarity": 1, "image above max_images": 2},
        ),
    ],
)
def test_wds_interleaved_leaves_images_and_documents_out_when_options_say_so(
    options: dict[str, Any], expected: Any, skipped: Any
) -> None:
    """The first images are kept, in the order in which they stand; the limits themselves are within."""
    pipe = IterableWrapper([sample()]).wds_interleaved(**options)
    assert list(map(words, pipe)) == ([] if expected is None else [expected])
    assert pipe.skipped == skipped


def test_wds_interleaved_keeps_images_without_a_similarity_when_there_is_a_limit() -> None:
    """Nothing is known against them; a missing image below the limit is no error."""
    infos = [INFOS[0] | {"matched_sim": None}, INFOS[1]]
    pipe = IterableWrapper([sample(infos=infos, names=["i0.png"])]).wds_interleaved(min_similarity=0.5)
    assert [words(document) for document in pipe] == [["One.", "i0.png", "Two.", "Three."]]


def test_wds_interleaved_counts_only_images_that_are_there_when_it_has_a_minimum() -> None:
    """A segment with None is no image."""
    pipe = IterableWrapper([sample(names=["i0.png"])]).wds_interleaved(missing="none", min_images=2)
    assert list(pipe) == []
    assert pipe.skipped == {"document with too few images": 1}


def test_wds_interleaved_counts_images_that_the_document_does_not_name() -> None:
    """They are left out; fields that are no images are kept."""
    pipe = IterableWrapper([sample(**{"i9.png": b"x", "jpg": b"x", "txt": "kept", "__pad__": True})]).wds_interleaved()
    (document,) = pipe
    assert pipe.skipped == {"image without a name in its document": 2}
    assert (document["txt"], document["__pad__"]) == ("kept", True)
    assert not {"i9.png", "jpg"} & set(document)


def test_wds_interleaved_decodes_no_image_that_is_left_out() -> None:
    """Neither pixels nor base64."""
    value = with_base64()
    value["image_info"][2]["image_base64"] = "no base64!"
    broken = {"__key__": "a", "json": value}
    (document,) = IterableWrapper([broken]).wds_interleaved(images="pil", max_images=3)
    assert [segment.image.size for segment in document["segments"] if isinstance(segment, ImageSegment)] == [(4, 3)] * 3
    with pytest.raises(DecodingError, match=r"field 'i2.png' of sample 'a' does not decode as base64"):
        list(IterableWrapper([broken]).wds_interleaved())


# ------------------------------------------------------------------------------------------------------------- damage
DAMAGED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "json that is cut": ({"json": packed(MATCHED)[:-9]}, SampleError, "JSONDecodeError"),
    "no json": ({"txt": b"x"}, SampleError, r"found only the fields \['txt'\]"),
    "a caption": ({"json": packed({"caption": "x"})}, SampleError, "expected text_list to be a list, found none among"),
    "an index out of range": (
        {"json": packed(MATCHED | {"image_info": [{"image_name": "a", "matched_text_index": 4}]})},
        SampleError,
        "matched_text_index to be the number of a text, 0 to 2, or 3 .* found 4",
    ),
    "a similarity that is NaN": (
        {"json": packed(MATCHED | {"image_info": [INFOS[0] | {"matched_sim": float("nan")}]})},
        SampleError,
        "matched_sim to be a finite number or null, found nan",
    ),
    "lists of two lengths": ({"json": packed(PARALLEL | {"texts": []})}, SampleError, "one length, found 7 and 0"),
    "missing images": ({"json": packed(PARALLEL)}, MissingFieldError, "images that are not there: i1.png, i0.png"),
    "base64 that is none": (
        {"json": {"text_list": [], "image_info": [{"matched_text_index": 0, "image_base64": "a"}]}},
        DecodingError,
        r"field 'image_info\[0\]' of sample 'bad' in shard x.tar does not decode as base64",
    ),
    "an image that is cut": (
        {"json": {"images": ["i0.png"], "texts": [None]}, "i0.png": PICTURES["i0.png"][:30]},
        DecodingError,
        "field 'i0.png' of sample 'bad' in shard x.tar does not decode as an image .spec 'pil'.",
    ),
    "a field of our name": (
        {"json": {"images": [], "texts": []}, "segments": b""},
        SampleError,
        "document 'bad' has a field 'segments', which wds_interleaved makes itself",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_wds_interleaved_asks_the_handler_when_a_document_is_damaged(damage: str) -> None:
    """One document may be wrong, the stream goes on; the error names key and what is wrong."""
    fields, error, message = DAMAGED[damage]
    source = IterableWrapper([sample("a"), {"__key__": "bad", "__url__": "x.tar", **fields}, sample("b")])
    with pytest.raises(error, match=message) as caught:
        list(source.wds_interleaved(images="pil"))
    assert getattr(caught.value, "key", None) == "bad"
    pipe = source.wds_interleaved(images="pil", handler=ignore_and_continue)
    assert [document["__key__"] for document in pipe] == ["a", "b"]
    assert pipe.skipped == {error.__name__: 1}
    assert [document["__key__"] for document in source.wds_interleaved(images="pil", handler=ignore_and_stop)] == ["a"]


def test_wds_interleaved_masks_secrets_when_it_fails() -> None:
    """A signed URL is in no message."""
    bad = [{"__key__": "a-1", "jpg": b""}, {"__key__": "b", "txt": b""}, sample(names=())]
    for item in bad:
        with pytest.raises(SampleError) as caught:
            list(IterableWrapper([item | {"__url__": "http://u:pw@h/x.tar?sig=secret"}]).wds_interleaved())
        assert "pw@" not in str(caught.value) + str(caught.value.shard)
        assert "secret" not in str(caught.value) + str(caught.value.shard)


def test_wds_interleaved_raises_when_its_source_does() -> None:
    """A handler is asked about this pipe's own items only."""
    pipe = IterableWrapper([1]).wds_map(len).wds_interleaved(handler=ignore_and_continue)
    with pytest.raises(TypeError, match="has no len"):
        list(pipe)
    assert not pipe.skipped


# ------------------------------------------------------------------------------------------------------- with others
def test_documents_stay_lists_when_they_are_batched_and_collated() -> None:
    """Segments are a list for each document, through pickling too."""
    samples = [sample(str(number)) for number in range(3)]
    (batch,) = IterableWrapper(samples).wds_interleaved().batch(3).collate(wds_collate)
    assert batch["__key__"] == ["0", "1", "2"]
    assert [words({"segments": segments}) for segments in batch["segments"]] == [ORDER] * 3
    assert pickle.loads(pickle.dumps(batch)) == batch
