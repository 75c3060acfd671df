"""Cells of tables: one line each, and read back as they were."""

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdata_wds.cli.tables import Binary, escape_cell, unescape_cell, write_cell

CELLS = {
    "": "",
    "plain": "plain",
    "a\tb": r"a\tb",
    "a\nb\r\n": r"a\nb\r\n",
    "a\\tb": r"a\\tb",
    "\\": r"\\",
    "größe \u2028 \0": "größe \u2028 \0",
    "caf\udce9": r"caf\xe9",
}


@pytest.mark.parametrize(("text", "cell"), CELLS.items())
def test_cell_is_as_documented_when_text_has_signs_of_its_own(text: str, cell: str) -> None:
    """Tabs, line ends and backslashes are escaped, nothing else."""
    assert escape_cell(text) == cell
    assert unescape_cell(cell) == text


@settings(max_examples=30)
@given(st.text())
def test_text_reads_back_when_written_to_a_cell(text: str) -> None:
    """Any text is one cell of one line."""
    cell = escape_cell(text)
    assert not set("\t\n\r") & set(cell)
    assert unescape_cell(cell) == text


@settings(max_examples=30)
@given(
    st.binary() | st.sampled_from([b"base64:/w==", b"\\xff", b"\\", b"base64:\xff"]),
    st.sampled_from(["escape", "base64"]),
)
def test_bytes_read_back_when_written_to_a_cell(data: bytes, binary: Binary) -> None:
    """Either way of writing binary data loses none of it, and keeps text that looks like it."""
    cell = write_cell(data, binary)
    assert not set("\t\n\r") & set(cell)
    cell.encode()
    if binary == "base64" and cell.startswith("base64:"):
        assert base64.b64decode(cell.removeprefix("base64:"), validate=True) == data
    else:
        assert unescape_cell(cell).encode(errors="surrogateescape") == data


def test_write_cell_names_the_byte_when_data_is_binary() -> None:
    """By default bytes that are not UTF-8 are an error that says where they are."""
    with pytest.raises(ValueError, match=r"byte 3 of 5 is b'\\xe9', which is not UTF-8"):
        write_cell(b"caf\xe9!")


def test_escape_cell_refuses_when_text_has_a_lone_surrogate() -> None:
    """UTF-8 has no bytes for it."""
    with pytest.raises(ValueError, match=r"character 1 of .* lone surrogate"):
        escape_cell("a\ud800")


@pytest.mark.parametrize("cell", ["\\", r"a\q", r"\x4", r"\x41", r"\X80"])
def test_unescape_cell_refuses_when_a_backslash_escapes_nothing(cell: str) -> None:
    """A file that was written by something else does not read as something else."""
    with pytest.raises(ValueError, match="backslash at character"):
        unescape_cell(cell)
