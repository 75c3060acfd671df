"""Which fields an extension means."""

import pickle

import pytest
import webdataset.autodecode

from torchdata_wds.codecs import Decoder, handle_extension

MATCHES = [
    ("png", "png", True), ("png", "input.png", True), ("png", "a.b.png", True), ("png", "xpng", False),
    ("png", "png.txt", False), ("png", "PNG", True), ("PNG", "input.Png", True), (".png", "png", True),
    (".seg.png", "seg.png", True), ("seg.png", "a.seg.png", True), ("seg.png", "png", False),
    ("seg.png", "xseg.png", False), ("jpg png", "png", True), ("jpg png", "gif", False),
]  # fmt: skip


def test_handle_extension_takes_a_field_when_its_last_parts_match() -> None:
    """An extension means whole dot-separated parts at the end, in any case: webdataset's rule, leading dot or not."""
    for extensions, field, expected in MATCHES:
        decoder = handle_extension(extensions, len)
        assert decoder("." + field, b"abc") == (3 if expected else None)
        assert Decoder(decoder)({field: b"abc"})[field] == (3 if expected else b"abc" if "txt" not in field else "abc")
        if not extensions.startswith("."):
            theirs = webdataset.autodecode.handle_extension(extensions, len)
            assert theirs("." + field, b"abc") == decoder("." + field, b"abc")


def test_handle_extension_passes_when_its_function_gives_none() -> None:
    """None from the function leaves the field to the next decoder."""
    assert Decoder(handle_extension("cls", lambda _: None))({"cls": b"7"}) == {"cls": 7}


def test_handle_extension_pickles_when_its_function_does() -> None:
    """The decoder goes to worker processes."""
    decoder = pickle.loads(pickle.dumps(handle_extension("jpg .seg.png", len)))
    assert decoder(".seg.png", b"ab") == 2
    assert repr(decoder) == "handle_extension('jpg seg.png', len)"


def test_handle_extension_raises_when_its_arguments_are_wrong() -> None:
    """Extensions are str, at least one, and the function is callable."""
    for extensions in ["", "  ", "."]:
        with pytest.raises(ValueError, match="extension"):
            handle_extension(extensions, len)
    for extensions, fn in [("jpg", None), ("jpg", "len"), (None, len), (b"jpg", len), (3, len), ([1], len)]:
        with pytest.raises(TypeError):
            handle_extension(extensions, fn)


def test_only_decodes_the_named_fields_when_given() -> None:
    """`only` names whole fields or globs, as str or list, as webdataset's `only` does; the others stay bytes."""
    for only, decoded in [
        (None, {"cls", "a.cls", "json.gz", "txt"}), ("cls", {"cls"}), ("*.cls", {"a.cls"}),
        ("*cls", {"cls", "a.cls"}), ("a.cls", {"a.cls"}), (".CLS", {"cls"}), ("json", set()),
        ("json.gz", {"json.gz"}), ("*.gz", {"json.gz"}), ("json.gz;txt cls", {"cls", "json.gz", "txt"}),
        (["txt", "a.cls"], {"txt", "a.cls"}), (("txt",), {"txt"}), ({"txt"}, {"txt"}), ("nothing", set()),
        ("", set()), ([], set()),
    ]:  # fmt: skip
        import gzip

        sample = {"cls": b"1", "a.cls": b"2", "json.gz": gzip.compress(b"3"), "txt": b"4"}
        result = Decoder(only=only)(sample)
        assert {field for field in sample if result[field] != sample[field]} == decoded


def test_only_keeps_users_decoders_away_when_a_field_is_not_named() -> None:
    """`only` holds for the user's functions too, and for names in any case."""
    assert Decoder(lambda *_: 0, only="cls")({"cls": b"1", "txt": b"a"}) == {"cls": 0, "txt": b"a"}
    assert Decoder(only="cls *.txt")({"CLS": b"1", "A.TXT": b"a"}) == {"CLS": 1, "A.TXT": "a"}


def test_only_raises_when_it_names_no_fields() -> None:
    """Anything but names is a TypeError."""
    for only in [1, b"cls", [b"cls"], [None], True]:
        with pytest.raises(TypeError, match="only"):
            Decoder(only=only)
