"""Text and integer fields."""

from __future__ import annotations

from typing import Any

import pytest

from torchdata_wds import handlers
from torchdata_wds.codecs import Decoder, decode_sample
from torchdata_wds.errors import DecodingError


@pytest.mark.parametrize("data", [b"", b"a", "ä€😀".encode(), b"line\r\nline\n\n", b"\x00"])
def test_text_keeps_every_character_when_utf8(data: bytes) -> None:
    """Text is neither stripped nor are its line ends changed."""
    assert Decoder()({"txt": data})["txt"] == data.decode("utf-8")


def test_text_drops_the_mark_when_it_begins_with_a_bom() -> None:
    """Exactly one byte order mark at the beginning is dropped."""
    assert Decoder()({"txt": b"\xef\xbb\xbf\xef\xbb\xbfx\xef\xbb\xbf"})["txt"] == "\ufeffx\ufeff"


@pytest.mark.parametrize(
    ("errors", "text"),
    [("replace", "a\ufffdb"), ("ignore", "ab"), ("backslashreplace", "a\\xffb"), ("surrogateescape", "a\udcffb")],
)
def test_text_follows_errors_when_not_utf8(errors: str, text: str) -> None:
    """`errors` chooses what bytes that are not UTF-8 become."""
    assert Decoder(errors=errors)({"txt": b"a\xffb"}) == {"txt": text}


def test_text_raises_when_not_utf8_and_strict() -> None:
    """By default, bytes that are not UTF-8 are an error that shows them."""
    with pytest.raises(DecodingError, match=r"(?s)text.*0xff.*3 bytes.*b'a\\xffb'"):
        Decoder()({"txt": b"a\xffb"})


@pytest.mark.parametrize("errors", ["", "Strict", "xmlcharrefreplace", "namereplace", "replce"])
def test_decoder_raises_when_errors_cannot_decode(errors: str) -> None:
    """An unknown `errors`, or one that only encodes, is refused by the constructor."""
    with pytest.raises(ValueError, match="backslashreplace"):
        Decoder(errors=errors)


@pytest.mark.parametrize("errors", [None, 1, b"strict"])
def test_decoder_raises_when_errors_is_no_str(errors: Any) -> None:
    """An `errors` of another type is a TypeError."""
    with pytest.raises(TypeError, match="errors"):
        Decoder(errors=errors)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"0", 0),
        (b"-3", -3),
        (b"+3", 3),
        (b"007", 7),
        (b"\xef\xbb\xbf12\r\n", 12),
        (b"\t 9 \n", 9),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
    ],
)
def test_integer_reads_decimal_numbers_when_surrounded_by_blanks(data: bytes, value: int) -> None:
    """Blanks, newlines, signs, leading zeros and a byte order mark are fine."""
    assert Decoder()({"cls": data}) == {"cls": value}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"1_000",
        "٣".encode(),
        "\uff11".encode(),
        b"1.0",
        b"1e3",
        b"0x1",
        b"1 2",
        b"--1",
        b"- 1",
        b"cat",
        b"1\x00",
    ],
)
def test_integer_raises_when_no_decimal_number(data: bytes) -> None:
    """What is no plain decimal number is an error, also where Python's int() would take it."""
    with pytest.raises(DecodingError, match=r"an integer.*expected a decimal integer"):
        Decoder()({"cls": data})


@pytest.mark.parametrize("data", [b" \n\xef\xbb\xbf7", b"7\n\xef\xbb\xbf", b"\xef\xbb\xbf 7 \r\n"])
def test_decode_int_reads_when_a_byte_order_mark_is_anywhere_around(data: bytes) -> None:
    """Blanks, newlines and byte order marks may stand on both sides of the number."""
    assert decode_sample({"cls": data}) == {"cls": 7}


@pytest.mark.parametrize("field", ["class", "count", "left.class"])
def test_class_stays_bytes_with_one_warning_when_it_is_a_word(field: str, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are numbers, words stay as they are, as webdataset leaves both."""
    handlers._said.clear()
    decoder = Decoder()
    assert [decoder({field: data})[field] for data in (b"7", b"dog", b" 8\n", b"1.5")] == [7, b"dog", 8, b"1.5"]
    assert ["handle_extension" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("field", ["cls", "index", "id"])
def test_number_raises_when_it_is_a_word(field: str) -> None:
    """The other integer fields hold numbers or are damaged."""
    with pytest.raises(DecodingError):
        Decoder()({field: b"dog"})
