"""The Decoder: order of decoders, what it leaves alone, its errors, pickling."""

import collections.abc
import io
import pickle
from typing import Any

import pytest
from torch.utils.data.datapipes.utils.common import StreamWrapper

from tests.kits.shards import jpeg_bytes
from torchdata_wds import codecs
from torchdata_wds.codecs import Decoder, decode_sample, handle_extension, image_decoder
from torchdata_wds.errors import DecodingError, SampleError, UnsafeDataError

SAMPLE = {"__key__": "k", "__url__": "shard-1.tar", "cls": b"7", "bin": b"x"}


def double(key: str, data: bytes) -> Any:
    """Decodes .cls to twice its value."""
    return 2 * int(data) if key == ".cls" else None


def fail(key: str, data: bytes) -> Any:
    """Fails on every field."""
    raise KeyError("missing entry")


def test_decoder_gives_a_new_dict_when_called() -> None:
    """The given sample is never changed; order and names stay."""
    sample = dict(SAMPLE)
    result = Decoder()(sample)
    assert result == {"__key__": "k", "__url__": "shard-1.tar", "cls": 7, "bin": b"x"}
    assert list(result) == list(SAMPLE)
    assert sample == SAMPLE


def test_decoder_leaves_metadata_when_its_names_look_like_fields() -> None:
    """Names like `__x__` are not offered to anybody, whatever they hold."""
    meta = {"__key__": b"1", "__url__": 3, "__x.cls__": b"1", "__local_path__": "p"}
    assert Decoder(fail)(meta) == meta


def test_decoder_leaves_values_when_they_are_no_bytes() -> None:
    """What was decoded before stays, so that decoding twice changes nothing."""
    once = Decoder()({"cls": b"7", "txt": b"8", "json": b'{"a": 1}'})
    assert Decoder(fail)(once) == once
    value = object()
    assert Decoder("rgb8")({"jpg": value})["jpg"] is value


def test_decoder_reads_and_closes_streams_when_values_are_open() -> None:
    """Torchdata's own readers leave streams in samples, under names with a dot."""
    for wrap in [io.BytesIO, lambda data: StreamWrapper(io.BytesIO(data))]:
        stream = wrap(b"7")
        assert Decoder()({".cls": stream, ".bin": wrap(b"raw")}) == {".cls": 7, ".bin": b"raw"}
        assert stream.closed


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_decoder_decodes_any_bytes_when_bytes_like(kind: Any) -> None:
    """Bytearrays and memoryviews are decoded as bytes; user functions get bytes."""
    seen = []

    def note(key: str, data: Any) -> None:
        seen.append(type(data))

    assert Decoder(note, "rgb8")({"cls": kind(b"7"), "txt": kind(b"a"), "json": kind(b"[]")}) == {
        "cls": 7,
        "txt": "a",
        "json": [],
    }
    assert set(seen) == {bytes}


def test_decoder_asks_users_first_and_in_order_when_several_can() -> None:
    """User functions come before image specs, specs before the table; the first that does not pass wins."""
    first = handle_extension("cls jpg", lambda _: "first")
    second = handle_extension("cls jpg txt", lambda _: "second")
    sample = {"cls": b"1", "jpg": jpeg_bytes(1), "txt": b"a", "json": b"1", "png": jpeg_bytes(2)}
    result = Decoder("pil", first, second)(sample)
    assert (result["cls"], result["jpg"], result["txt"], result["json"]) == ("first", "first", "second", 1)
    assert result["png"].size == (16, 12)
    result = Decoder("pil", image_decoder("rgb8", max_size=8))({"jpg": jpeg_bytes(1)})
    assert result["jpg"].shape == (6, 8, 3)
    for value in (0, "", [], False, b""):
        assert Decoder(lambda *_, value=value: value)({"cls": b"7"}) == {"cls": value}


def test_decoder_shows_dotted_keys_when_it_asks_users() -> None:
    """The key is a dot and the field, as webdataset gives it."""
    seen = []
    Decoder(lambda key, _: seen.append(key))({"a.seg.PNG": b"", "bin": b""})
    assert seen == [".a.seg.PNG", ".bin"]


def test_decode_sample_equals_decoder_when_same_arguments() -> None:
    """The function and the class are one implementation."""
    assert decode_sample(SAMPLE) == Decoder()(SAMPLE)
    assert decode_sample(SAMPLE, double) == decode_sample(SAMPLE, [double, "pil"]) == Decoder(double)(SAMPLE)
    assert decode_sample({"jpg": jpeg_bytes(1)}, "pil", only="png") == {"jpg": jpeg_bytes(1)}
    assert decode_sample({"txt": b"\xff"}, errors="replace") == {"txt": "\ufffd"}
    with pytest.raises(ValueError, match="max_bytes"):
        decode_sample({}, max_bytes=0)
    with pytest.raises(UnsafeDataError):
        decode_sample({"pkl": pickle.dumps(1)})
    assert decode_sample({"pkl": pickle.dumps(1)}, allow_pickle=True) == {"pkl": 1}


def test_decoder_raises_with_place_and_cause_when_a_field_is_damaged() -> None:
    """The error names shard, key, field, type, cause, bytes and cure, and survives pickling."""
    with pytest.raises(DecodingError) as caught:
        Decoder()({**SAMPLE, "meta.json": b'{"a": '})
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.shard, error.key, error.field) == ("shard-1.tar", "k", "meta.json")
    for part in (
        "'meta.json'", "'k'", "shard-1.tar", "json", "JSONDecodeError", "char 6", "6 bytes", "warn_and_continue",
    ):  # fmt: skip
        assert part in str(error)
    assert isinstance(error, SampleError)
    assert isinstance(caught.value.__cause__, ValueError)


def test_decoder_masks_secrets_when_the_url_has_some() -> None:
    """Passwords and signed queries of the shard's URL are in no message."""
    sample = {"__key__": "k", "__url__": "https://me:secret@host/a.tar?sig=secret", "cls": b""}
    with pytest.raises(DecodingError, match=r"https://me:\*\*\*@host/a\.tar") as caught:
        Decoder()(sample)
    assert "secret" not in str(caught.value)
    assert "secret" not in str(caught.value.shard)


def test_decoder_raises_when_key_and_url_are_missing() -> None:
    """A sample without key and URL still gives a readable error."""
    with pytest.raises(DecodingError, match=r"field 'cls' of sample '\?' does not decode.*The field is empty"):
        Decoder()({"cls": b""})


def test_decoder_wraps_errors_when_a_users_function_fails() -> None:
    """A DecodingError names the function; only the package's own missing extras pass as ImportError."""
    for decoder, name in [
        (fail, "decoder fail"),
        (handle_extension("cls", float), r"handle_extension\('cls', float\)"),
        (image_decoder("pil"), r"image_decoder\('pil'\)"),
    ]:
        with pytest.raises(DecodingError, match=name) as caught:
            Decoder(decoder)({"__key__": "k", "jpg": b"no", "cls": b"no"})
        assert caught.value.__cause__ is not None

    def needs(key: str, data: bytes) -> None:
        raise ImportError("no such module")

    with pytest.raises(DecodingError, match="no such module"):
        Decoder(needs)(SAMPLE)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_decoder_lets_interrupts_pass_when_raised_in_a_decoder(error: type[BaseException]) -> None:
    """What is no Exception is not wrapped."""

    def interrupt(key: str, data: bytes) -> None:
        raise error

    with pytest.raises(error):
        Decoder(interrupt)(SAMPLE)


def test_decoder_raises_when_an_argument_has_a_wrong_type() -> None:
    """A decoder is a spec or a callable; flags are True or False."""
    for decoder in [None, 3, b"pil", ["pil"], {"jpg": len}]:
        with pytest.raises(TypeError, match="callable"):
            Decoder(decoder)
    with pytest.raises(TypeError, match="exif_transpose"):
        Decoder(exif_transpose="yes")  # type: ignore[arg-type]


def test_decoder_pickles_small_when_it_was_used() -> None:
    """Only the arguments are pickled, before and after use, and the copy works."""
    decoder = Decoder("rgb8", double, only="cls jpg", errors="replace", max_bytes=1000)
    before = pickle.dumps(decoder)
    assert decoder({"cls": b"4", "jpg": jpeg_bytes(1)})["cls"] == 8
    assert pickle.dumps(decoder) == before
    again = pickle.loads(before)
    assert again({"cls": b"4", "txt": b"5"}) == {"cls": 8, "txt": b"5"}
    assert repr(again) == repr(decoder)


def test_decoder_repr_shows_its_arguments_when_not_default() -> None:
    """The repr is short and says what was asked for; graph traversal of DataPipes must not look into a decoder."""
    assert repr(Decoder()) == "Decoder()"
    assert repr(Decoder("pil", double, handle_extension("x", len), only="jpg cls", allow_pickle=True)) == (
        "Decoder('pil', double, handle_extension('x', len), only=('jpg', 'cls'), allow_pickle=True)"
    )
    assert repr(Decoder(image_decoder("rgb8", max_size=9), errors="ignore")) == (
        "Decoder(image_decoder('rgb8', max_size=9), errors='ignore')"
    )
    assert not isinstance(Decoder(), collections.abc.Collection)


def test_decoder_forgets_plans_when_field_names_never_end() -> None:
    """Ever new field names do not fill the memory."""
    decoder = Decoder()
    for number in range(5000):
        assert decoder({f"{number}.cls": b"1"}) == {f"{number}.cls": 1}
    assert len(decoder._plans) <= 1000


def test_all_is_exact_when_the_package_is_listed() -> None:
    """Every public name exists, and has a docstring where it is a class or function."""
    for name in codecs.__all__:
        value = getattr(codecs, name)
        assert value.__doc__ or not callable(value)
