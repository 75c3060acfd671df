"""Interleaved documents: the two forms of JSON, finding images, and samples to write."""

import json
import pickle
import random
from typing import Any

import pytest

from torchdata_wds.codecs import IMAGE_FIELDS
from torchdata_wds.errors import SampleError
from torchdata_wds.format.documents.assembling import MOST_WAITING, FoundDocument, find_documents
from torchdata_wds.format.documents.layouts import (
    IMAGE_EXTENSIONS,
    ImageSegment,
    TextSegment,
    find_images,
    find_json,
    in_order_of_place,
    interleaved_sample,
    load_json,
    parse_document,
)


def info(name: str, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"image_name": name, "matched_text_index": index, **more}


def matched(texts: int, *infos: Any, **more: Any) -> dict[str, Any]:
    """A document as MMC4 has it."""
    return {"text_list": [f"t{number}" for number in range(texts)], "image_info": list(infos), **more}


def order(document: Any) -> list[str]:
    """Texts and names of images in their order."""
    segments = in_order_of_place(
        document.texts, [(entry.place, ImageSegment(None, entry.name)) for entry in document.images]
    )
    return [segment.text if isinstance(segment, TextSegment) else str(segment.name) for segment in segments]


# ----------------------------------------------------------------------------------------------------- what JSON says
def test_image_extensions_are_those_of_the_codecs() -> None:
    """This floor may not import them; the order is another."""
    assert set(IMAGE_EXTENSIONS) == set(IMAGE_FIELDS)


def test_parse_document_puts_images_before_the_text_of_their_index() -> None:
    """As MMC4 means it; those of one index keep their order, the number of texts means behind them all."""
    document = parse_document(matched(2, info("c", 2), info("b", 1), info("a", 0), info("b2", 1)), "auto")
    assert order(document) == ["a", "t0", "b", "b2", "t1", "c"]
    assert [entry.row for entry in document.images] == [2, 1, 3, 0]


def test_parse_document_keeps_all_that_it_does_not_know() -> None:
    """Of an image and of the document."""
    value = matched(
        1, info("a", matched_sim=0.5, raw_url="http://x/a.png"), similarity_matrix=[[0.5]], url="u", could_have=False
    )
    document = parse_document(value, "members")
    assert (document.images[0].similarity, document.images[0].info) == (0.5, {"raw_url": "http://x/a.png"})
    assert (document.matrix, document.metadata) == ([[0.5]], {"url": "u", "could_have": False})


@pytest.mark.parametrize("layout", ["auto", "obelics"])
@pytest.mark.parametrize("as_text", [True, False])
def test_parse_document_takes_parallel_lists_when_they_are_obelics(layout: Any, as_text: bool) -> None:
    """What is said about an image comes from the list `metadata`, which is often JSON in a str."""
    about = [None, {"alt": "x"}, None, {}]
    value = {
        "images": [None, "a.jpg", None, "b.jpg"],
        "texts": ["t0", None, "t1", None],
        "metadata": json.dumps(about) if as_text else about,
        "general_metadata": "{}",
    }
    document = parse_document(value, layout)
    assert order(document) == ["t0", "a.jpg", "t1", "b.jpg"]
    assert [entry.info for entry in document.images] == [{"alt": "x"}, {}]
    assert document.metadata == {"general_metadata": "{}"}


def test_parse_document_takes_documents_without_texts_or_images() -> None:
    """Empty lists are lists."""
    assert order(parse_document(matched(2), "auto")) == ["t0", "t1"]
    assert order(parse_document(matched(0, info("a", 0)), "auto")) == ["a"]
    assert order(parse_document({"images": [], "texts": []}, "auto")) == []


WRONG = [
    ([1], "expected an object with text_list and image_info, found list"),
    (None, "found null"),
    ({"caption": "x"}, r"expected text_list to be a list, found none among the keys \['caption'\]"),
    ({"text_list": "abc", "image_info": []}, "expected text_list to be a list, found str 'abc'"),
    ({"text_list": ["a", 5], "image_info": []}, r"expected text_list\[1\] to be a str, found 5"),
    ({"text_list": ["a"]}, "expected image_info to be a list, found none"),
    (matched(1, "a.jpg"), r"expected image_info\[0\] to be an object, found str"),
    (matched(1, {"matched_text_index": 0}), r"image_info\[0\].image_name to be the name of an image, found null"),
    (matched(1, info("")), "image_name to be the name of an image"),
    (matched(1, info(7)), "image_name to be the name of an image, found 7"),  # type: ignore[arg-type]
    (matched(1, {"image_name": "a"}), "matched_text_index to be the number of a text, 0 to 0, or 1 .* found null"),
    (matched(1, info("a", 2)), "matched_text_index to be the number of a text, 0 to 0, or 1 .* found 2"),
    (matched(1, info("a", -1)), "found -1"),
    (matched(1, info("a", True)), "found True"),
    (matched(1, info("a", 0.0)), "found 0.0"),  # type: ignore[arg-type]
    (matched(1, info("a", matched_sim=float("nan"))), "matched_sim to be a finite number or null, found nan"),
    (matched(1, info("a", matched_sim="0.5")), "matched_sim to be a finite number"),
    (matched(1, info("a", image_base64=5)), "image_base64 to be a str, found 5"),
    (matched(1, info("a"), similarity_matrix=[]), "similarity_matrix to be 1 lists.*of 1 finite numbers, found 0"),
    (matched(1, info("a"), similarity_matrix=[[1, 2]]), "found something else as number 0"),
    (matched(1, info("a"), similarity_matrix=[[float("inf")]]), "found something else as number 0"),
    (matched(1, info("a"), similarity_matrix="x"), "found str 'x'"),
    ({"images": ["a"], "texts": []}, "one length, found 1 and 0"),
    ({"images": ["a"], "texts": ["b"]}, r"images\[0\] or a str in texts\[0\] and null in the other"),
    ({"images": [None], "texts": [None]}, "found null and null"),
    ({"images": [""], "texts": [None]}, "found str '' and null"),
    ({"images": ["a"], "texts": [None], "metadata": "[]"}, "metadata to be a list of 1, one for each place, found 0"),
    ({"images": ["a"], "texts": [None], "metadata": ["x"]}, r"metadata\[0\] to be an object or null"),
    ({"images": ["a"], "texts": [None], "metadata": "{"}, "Expecting"),
]


@pytest.mark.parametrize(("value", "words"), WRONG)
def test_parse_document_raises_when_something_is_wrong(value: Any, words: str) -> None:
    """It says where, what was expected and what was found."""
    with pytest.raises(ValueError, match=words):
        parse_document(value, "auto")


def test_parse_document_raises_when_the_form_is_not_the_layouts() -> None:
    """A layout that is given is kept to."""
    with pytest.raises(ValueError, match="expected text_list to be a list, found none"):
        parse_document({"images": [], "texts": []}, "members")
    with pytest.raises(ValueError, match="expected images to be a list, found none"):
        parse_document(matched(1), "obelics")


def test_find_json_and_load_json_take_every_spelling() -> None:
    """Upper case where fields are not lower-cased, a byte order mark, decoded before."""
    assert find_json({"__key__": "a", "JSON": b""}) == "JSON"
    assert find_json({"Json": b"", "json": b""}) == "json"
    assert find_json({"meta.json": b""}) is None
    assert load_json(b"\xef\xbb\xbf[1]") == load_json(bytearray(b"[1]")) == load_json([1]) == [1]


@pytest.mark.parametrize(
    ("names", "fields", "found"),
    [
        (["a.jpg"], ["a.jpg", "a.png"], {"a.jpg": "a.jpg"}),
        (["A.JPG"], ["a.jpg"], {"A.JPG": "a.jpg"}),
        (["A.jpg", "a.jpg"], ["A.jpg", "a.jpg"], {"A.jpg": "A.jpg", "a.jpg": "a.jpg"}),
        (["a.png"], ["a.webp", "a.jpg"], {"a.png": "a.jpg"}),
        (["a.gif"], ["a.jpg"], {"a.gif": "a.jpg"}),
        (["a.b.png"], ["a.jpg", "a.b.jpg"], {"a.b.png": "a.b.jpg"}),
        (["a"], ["a.png"], {"a": "a.png"}),
        (["a.b"], ["a.jpg", "a.b.jpg"], {"a.b": "a.b.jpg"}),
        (["a.png", "a.jpg"], ["a.jpg"], {"a.jpg": "a.jpg"}),
        (["a.png", "a.png"], ["a.jpg"], {"a.png": "a.jpg"}),
        (["a.png", "a.gif"], ["a.jpg"], {}),
        (["a.png", "a"], ["a.jpg"], {}),
        (["A.jpg", "a.JPG"], ["a.jpg"], {}),
        (["b.png"], ["a.jpg", "txt"], {}),
        (["http://x/a.jpg"], ["a.jpg"], {}),
    ],
)
def test_find_images_finds_what_was_stored_under_another_name(
    names: list[str], fields: list[str], found: dict[str, str]
) -> None:
    """Exact first, then lower case, then re-encoded; a field that may be either of two images is that of neither."""
    assert find_images(names, fields) == found


# ------------------------------------------------------------------------------------------------------- in a stream
def document(key: str, *names: str, url: str = "x.tar", **fields: Any) -> dict[str, Any]:
    return {"__key__": key, "__url__": url, "json": matched(1, *map(info, names)), **fields}


def image(key: str, url: str = "x.tar", field: str = "jpg") -> dict[str, Any]:
    return {"__key__": key, "__url__": url, field: key.encode()}


def found(samples: list[dict[str, Any]], layout: Any = "dash") -> list[Any]:
    """Key and fields of each document, and the keys that an error speaks of."""
    return [
        (item.sample["__key__"], item.fields) if isinstance(item, FoundDocument) else str(item)
        for item in find_documents(samples, layout)
    ]


@pytest.mark.parametrize("layout", ["dash", "auto"])
def test_find_documents_takes_images_behind_and_before_when_their_keys_have_a_dash(layout: Any) -> None:
    """As DreamLLM writes them, sorted by name, which puts images first, and with folders."""
    parts = {"1.jpg": b"d/a-1", "2.jpg": b"d/a-2"}
    behind = [document("d/a", "1.png", "2.png"), image("d/a-1"), image("d/a-2")]
    before = [image("d/a-1"), image("d/a-2"), document("d/a", "1.png", "2.png")]
    around = [image("d/a-1"), document("d/a", "1.png", "2.png"), image("d/a-2")]
    for samples in (behind, before, around):
        assert found(samples, layout) == [("d/a", parts)]


def test_find_documents_gives_a_document_when_its_last_image_has_come() -> None:
    """Not only when the next one does: nothing is held longer than it must be."""
    stream = iter([document("a", "1"), image("a-1"), RuntimeError])
    finder = find_documents((item if isinstance(item, dict) else pytest.fail("read on") for item in stream), "dash")
    assert next(finder).sample["__key__"] == "a"  # type: ignore[union-attr]


@pytest.mark.parametrize("is_first", [True, False])
def test_find_documents_takes_images_in_folders_when_their_names_have_slashes(is_first: bool) -> None:
    """The dash is in the name of a folder then."""
    images, texts = [image("d/a-in/1"), image("d/a-2")], [document("d/a", "in/1.png", "2.png")]
    expected = [("d/a", {"in/1.jpg": b"d/a-in/1", "2.jpg": b"d/a-2"})]
    assert found([*images, *texts] if is_first else [*texts, *images]) == expected


@pytest.mark.parametrize(
    "samples",
    [
        [document("12", "a", "3"), image("12-a"), image("12-3"), document("12-3", "b"), image("12-3-b")],
        [image("12-3-b"), document("12-3", "b"), image("12-3"), image("12-a"), document("12", "a", "3")],
        [image("12-3"), image("12-3-b"), image("12-a"), document("12", "a", "3"), document("12-3", "b")],
        [image("12-a"), document("12", "a", "3"), image("12-3"), document("12-3", "b"), image("12-3-b")],
        [image("12-3-b"), document("12", "a", "3"), image("12-3"), image("12-a"), document("12-3", "b")],
    ],
)
def test_find_documents_swallows_nothing_when_a_key_is_the_beginning_of_another(samples: list[Any]) -> None:
    """An image belongs to the document that names it, not to each whose key it begins with."""
    assert dict(found(samples)) == {"12": {"a.jpg": b"12-a", "3.jpg": b"12-3"}, "12-3": {"b.jpg": b"12-3-b"}}


def test_find_documents_shares_a_sample_when_its_key_is_that_of_a_document_and_of_an_image() -> None:
    """12-3.jpg lies beside 12-3.json, in one sample, and is image 3 of document 12: whichever comes first."""
    shared = document("12-3", "b", jpg=b"12-3")
    assert dict(found([document("12", "3"), shared, image("12-3-b")])) == {
        "12": {"3.jpg": b"12-3"},
        "12-3": {"b.jpg": b"12-3-b"},
    }
    assert dict(found([image("12-3-b"), shared, document("12", "3")])) == {
        "12": {"3.jpg": b"12-3"},
        "12-3": {"b.jpg": b"12-3-b", "jpg": b"12-3"},
    }


@pytest.mark.parametrize("seed", range(50))
def test_find_documents_loses_nothing_when_images_come_in_any_order(seed: int) -> None:
    """Anywhere before their document, or between it and the next; keys and images are made of the same few parts."""
    rng = random.Random(seed)
    keys = rng.sample(["1", "1-1", "1-2", "1-1-1", "1-2-1", "2", "2-1-2", "11"], 5)
    images: dict[str, str] = {}
    for name in rng.sample(["1", "2", "3", "1-3", "2-3", "11", "1-1-3"], 6):
        key = rng.choice(keys)
        if f"{key}-{name}" not in keys:
            images.setdefault(f"{key}-{name}", key)
    named = {key: [place[len(key) + 1 :] for place, owner in images.items() if owner == key] for key in keys}
    stream = [document(key, *named[key]) for key in keys]
    for place in rng.sample(sorted(images), len(images)):
        own = next(number for number, item in enumerate(stream) if item["__key__"] == images[place])
        following = (number for number in range(own + 1, len(stream)) if "json" in stream[number])
        stream.insert(rng.randint(0, next(following, len(stream))), image(place))
    assert dict(found(stream)) == {
        key: {f"{name}.jpg": f"{key}-{name}".encode() for name in named[key]} for key in keys
    }


def test_find_documents_shares_so_many_images_and_no_more() -> None:
    """They are kept for documents to come, which mostly do not."""
    shared = [document(f"p-{number}", jpg=b"x") for number in range(MOST_WAITING + 1)]
    assert found([*shared, document("p", "0", "1")])[-1] == ("p", {"1.jpg": b"x"})


def test_find_documents_tells_of_damaged_json_when_its_sample_has_an_image_of_another() -> None:
    """The image is taken, and the document that cannot be read is an error all the same."""
    outcome = found([document("12", "3"), {"__key__": "12-3", "__url__": "x.tar", "json": b"{", "jpg": b"x"}])
    assert "field 'json' of sample '12-3'" in outcome[0]
    assert (outcome[1][0], outcome[1][1]["3.jpg"]) == ("12", b"x")


def test_find_documents_goes_on_when_something_foreign_lies_between_images() -> None:
    """It is an error of its own, and does not split the document."""
    foreign = {"__key__": "readme", "__url__": "x.tar", "txt": b"x"}
    outcome = found([document("a", "1", "2"), image("a-1"), foreign, image("a-2")])
    assert outcome[1] == ("a", {"1.jpg": b"a-1", "2.jpg": b"a-2"})
    assert "field 'json' of sample 'readme'" in outcome[0]
    assert "found only the fields ['txt']" in outcome[0]


def test_find_documents_keeps_every_part_of_a_name_when_it_has_several_dots() -> None:
    """The key ends at the first dot; what an image brings along is kept, too."""
    one = image("a-1", field="b.jpg") | {"txt": b"about", "json": {"width": 3}}
    assert found([document("a", "1.b.png"), one]) == [
        ("a", {"1.b.jpg": b"a-1", "1.txt": b"about", "1.json": {"width": 3}})
    ]


def test_find_documents_never_goes_on_when_the_shard_ends() -> None:
    """An image of the next shard, or of the next reading of one, belongs to no document of this."""
    outcome = found([document("a", "1"), image("a-1", url="y.tar")])
    assert outcome[0] == ("a", {})
    assert "1 samples of shard y.tar belong to no document: a-1." in outcome[1]
    outcome = found([document("a", "1"), image("a-2"), document("a", "1"), image("a-1")])
    assert (outcome[0], outcome[2]) == (("a", {}), ("a", {"1.jpg": b"a-1"}))
    assert "belong to no document: a-2." in outcome[1]


def test_find_documents_ends_the_shard_that_is_quiet_longest_when_several_are_open() -> None:
    """No more shards are open than may be: the document of the oldest is given when another begins."""
    streams = {url: [document("a", "1", url=url), image("a-1", url=url)] for url in "xyz"}
    turns = [streams["x"][0], streams["y"][0], streams["z"][0], streams["y"][1], streams["z"][1]]
    urls = [
        (item.sample["__url__"], len(item.fields)) if isinstance(item, FoundDocument) else str(item)
        for item in find_documents(turns, "dash", shards=2)
    ]
    assert urls == [("x", 0), ("y", 1), ("z", 1)]


def test_find_documents_names_images_when_no_document_does() -> None:
    """Nothing is dropped without a word."""
    (error,) = find_documents([image(f"a-{number}") for number in range(7)], "dash", lambda url: f"<{url}>")
    assert isinstance(error, SampleError)
    assert "7 samples of shard <x.tar> belong to no document: a-0, a-1, a-2, a-3, a-4, ..." in str(error)
    assert (error.shard, error.key) == ("<x.tar>", "a-0")


def test_find_documents_gives_up_an_image_when_another_has_its_key() -> None:
    """Where keys may come back: only one can wait."""
    outcome = found([image("b-2"), image("a-1"), image("a-1"), document("a", "1")])
    assert "1 samples of shard x.tar belong to no document: a-1." in outcome[0]
    assert outcome[1] == ("a", {"1.jpg": b"a-1"})
    assert "1 samples of shard x.tar belong to no document: b-2." in outcome[2]


def test_find_documents_waits_for_what_is_in_the_json_when_the_layout_is_dash() -> None:
    """With "auto" the JSON goes before; a layout that is given is kept to."""
    one = document("a") | {"json": matched(1, info("1", image_base64="eA=="))}
    assert found([one, image("a-1")], "dash") == [("a", {"1.jpg": b"a-1"})]
    outcome = found([one, image("a-1")], "auto")
    assert outcome[0] == ("a", {})
    assert "belong to no document: a-1." in outcome[1]


def test_find_documents_holds_so_many_images_and_no_more() -> None:
    """A shard of pairs, which are no documents, does not fill the memory; later images find their document."""
    samples = [image(f"p-{number}") for number in range(MOST_WAITING)]
    outcome = found([*samples, image("a-1"), document("a", "1")])
    assert f"{MOST_WAITING // 2} samples" in outcome[0]
    assert outcome[1] == ("a", {"1.jpg": b"a-1"})
    assert f"{MOST_WAITING // 2} samples" in outcome[2]
    assert len(outcome) == 3


@pytest.mark.parametrize("layout", ["members", "base64", "obelics"])
def test_find_documents_waits_for_nothing_when_images_cannot_come(layout: Any) -> None:
    """A sample with a dash in its key is one as any other."""
    (error,) = found([image("a-1")], layout)
    assert "not an interleaved document: expected the JSON of a document" in error


@pytest.mark.parametrize("item", [3, ("a", b"b"), {"json": b"{}"}, {"__key__": None, "json": {}}])
def test_find_documents_says_so_when_an_item_is_no_sample(item: Any) -> None:
    """And goes on."""
    outcome = found([item, document("a")])
    assert "takes samples with a __key__" in outcome[0]
    assert outcome[1:] == [("a", {})]


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b'{"text_list": []}', b"[" * 100_000])
def test_find_documents_names_the_sample_when_its_json_is_damaged(data: bytes) -> None:
    """With shard, key and field."""
    (error,) = find_documents([{"__key__": "a", "__url__": "x.tar", "json": data}], "auto")
    assert isinstance(error, SampleError)
    assert (error.shard, error.key, error.field) == ("x.tar", "a", "json")
    assert "field 'json' of sample 'a' in shard x.tar is not an interleaved document" in str(error)


# ----------------------------------------------------------------------------------------------------------- writing
def test_interleaved_sample_gives_fields_that_are_found_again() -> None:
    """Names with and without extension, in upper case, addresses, and none."""
    segments = [
        ImageSegment(b"0", "Cat.PNG", 0.5, {"raw_url": "u"}),
        TextSegment("t"),
        ImageSegment(b"1", "dog"),
        ImageSegment(b"2", "http://x/y.jpg?size=3"),
        ImageSegment(b"3"),
        ImageSegment(None, "gone.jpg"),
    ]
    written = interleaved_sample(
        {"__key__": "a", "__url__": "x.tar", "segments": segments, "metadata": {"url": "u"}, "txt": b"kept"}
    )
    assert {field: value for field, value in written.items() if isinstance(value, bytes)} == {
        **{"txt": b"kept", "cat.png": b"0", "dog.jpg": b"1"},
        **{"2.jpg": b"2", "3.jpg": b"3"},
    }
    document = parse_document(written["json"], "members")
    names = ["Cat.PNG", "dog", "2.jpg", "3.jpg", "gone.jpg"]
    assert [entry.name for entry in document.images] == names
    assert [entry.place for entry in document.images] == [0, 1, 1, 1, 1]
    assert (document.images[0].similarity, document.images[0].info) == (0.5, {"raw_url": "u"})
    assert document.images[2].info == {"raw_url": "http://x/y.jpg?size=3"}
    assert document.metadata == {"url": "u"}
    assert find_images(names, written) == dict(zip(names, ["cat.png", "dog.jpg", "2.jpg", "3.jpg"], strict=False))


def test_interleaved_sample_writes_an_image_once_when_it_stands_twice() -> None:
    """The same object under the same name; two images under one name are an error."""
    cat = ImageSegment(b"cat", "cat.jpg")
    written = interleaved_sample({"__key__": "a", "segments": [cat, TextSegment("t"), cat]})
    assert written["cat.jpg"] == b"cat"
    assert [entry["matched_text_index"] for entry in written["json"]["image_info"]] == [0, 1]
    with pytest.raises(SampleError, match=r"document 'a' cannot be written: the field 'cat.jpg' would be two things"):
        interleaved_sample({"__key__": "a", "segments": [cat, ImageSegment(b"dog", "CAT.jpg")]})


@pytest.mark.parametrize(("there", "missing"), [("a.png", "a.png"), ("1.jpg", None), ("x", "x.png"), ("a.jpg", "txt")])
def test_interleaved_sample_raises_when_a_missing_image_would_be_found_again_as_another(
    there: str, missing: str | None
) -> None:
    """What is written reads back as it was, or is refused."""
    segments = [ImageSegment(b"0", there), ImageSegment(None, missing)]
    for one in (segments, segments[::-1] if missing else segments):
        with pytest.raises(SampleError, match="would be read back as another"):
            interleaved_sample({"__key__": "a", "segments": one, "txt": b"no image"})


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"segments": [], "json": {}}, "it has a field 'json' besides"),
        ({"segments": [ImageSegment(b"0", "a.jpg")], "a.jpg": b"1"}, "'a.jpg' would be two things"),
        ({"__key__": "a"}, "expected a list of segments, found NoneType"),
        ({"segments": ["text"]}, "expected TextSegment .* and ImageSegment, found str"),
        ({"segments": [TextSegment(b"x")]}, "TextSegment .of a str."),  # type: ignore[arg-type]
        ({"segments": [], "metadata": {"text_list": []}}, r"its metadata has \['text_list'\]"),
    ],
)
def test_interleaved_sample_raises_when_it_is_given_no_document(document: dict[str, Any], words: str) -> None:
    """What cannot be written as it is meant is refused."""
    with pytest.raises(SampleError, match=words):
        interleaved_sample(document)


def test_segments_pickle_and_compare() -> None:
    """They go through worker processes."""
    segments = [TextSegment("t"), ImageSegment(b"x", "a.jpg", 0.5, {"alt": "x"})]
    copies = pickle.loads(pickle.dumps(segments))
    assert copies == segments
    assert isinstance(copies[1], ImageSegment)
