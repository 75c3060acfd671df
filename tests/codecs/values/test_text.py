"""Text and integer fields."""

import pytest

from torchdata_wds import handlers
from torchdata_wds.codecs import Decoder, decode_sample
from torchdata_wds.errors import DecodingError


def test_text_keeps_every_character_when_utf8() -> None:
    """Blanks and line ends are kept; exactly one byte order mark at the beginning is dropped."""
    for data in [b"", b"a", "ä€😀".encode(), b"line\r\nline\n\n", b"\x00"]:
        assert Decoder()({"txt": data})["txt"] == data.decode("utf-8")
    assert Decoder()({"txt": b"\xef\xbb\xbf\xef\xbb\xbfx\xef\xbb\xbf"})["txt"] == "\ufeffx\ufeff"


def test_text_follows_errors_when_not_utf8() -> None:
    """`errors` chooses what bytes that are not UTF-8 become; by default they are an error that shows them."""
    for errors, text in [
        ("replace", "a\ufffdb"),
        ("ignore", "ab"),
        ("backslashreplace", "a\\xffb"),
        ("surrogateescape", "a\udcffb"),
    ]:
        assert Decoder(errors=errors)({"txt": b"a\xffb"}) == {"txt": text}
    with pytest.raises(DecodingError, match=r"(?s)text.*0xff.*3 bytes.*b'a\\xffb'"):
        Decoder()({"txt": b"a\xffb"})


def test_decoder_raises_when_errors_cannot_decode() -> None:
    """An unknown `errors`, one that only encodes, or one of another type is refused by the constructor."""
    for errors in ["", "Strict", "xmlcharrefreplace", "namereplace", "replce"]:
        with pytest.raises(ValueError, match="backslashreplace"):
            Decoder(errors=errors)
    for errors in [None, 1, b"strict"]:
        with pytest.raises(TypeError, match="errors"):
            Decoder(errors=errors)


def test_integer_reads_decimal_numbers_when_surrounded_by_blanks() -> None:
    """Blanks, newlines and byte order marks on both sides, signs and leading zeros are fine."""
    for data, value in [
        (b"0", 0), (b"-3", -3), (b"+3", 3), (b"007", 7), (b"\xef\xbb\xbf12\r\n", 12), (b"\t 9 \n", 9),
        (b"123456789012345678901234567890", 123456789012345678901234567890),
    ]:  # fmt: skip
        assert Decoder()({"cls": data}) == {"cls": value}
    for data in [b" \n\xef\xbb\xbf7", b"7\n\xef\xbb\xbf", b"\xef\xbb\xbf 7 \r\n"]:
        assert decode_sample({"cls": data}) == {"cls": 7}


def test_integer_raises_when_no_decimal_number() -> None:
    """What is not a plain decimal number is an error, also where Python's int() would take it."""
    for data in [
        b"", b" ", b"1_000", "٣".encode(), "\uff11".encode(), b"1.0", b"1e3", b"0x1", b"1 2", b"--1", b"- 1", b"cat",
        b"1\x00",
    ]:  # fmt: skip
        with pytest.raises(DecodingError, match=r"an integer.*expected a decimal integer"):
            Decoder()({"cls": data})
    for field in ["cls", "index", "id"]:
        with pytest.raises(DecodingError):
            Decoder()({field: b"dog"})


@pytest.mark.parametrize("field", ["class", "count", "left.class"])
def test_class_stays_bytes_with_one_warning_when_it_is_a_word(field: str, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers are numbers, words stay as they are, as webdataset leaves both."""
    handlers.said.clear()
    decoder = Decoder()
    assert [decoder({field: data})[field] for data in (b"7", b"dog", b" 8\n", b"1.5")] == [7, b"dog", 8, b"1.5"]
    assert ["handle_extension" in record.message for record in caplog.records] == [True]
