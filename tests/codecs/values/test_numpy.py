"""The npy, npz and tenbin fields."""

import io
import itertools
import struct
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest
import webdataset.tenbin

from tests.codecs.test_table import ARRAY, npy_bytes, npz_bytes
from torchdata_wds.codecs import Decoder, decode_sample
from torchdata_wds.errors import DecodingError

DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u8"]


def decode(field: str, data: bytes, **options: Any) -> Any:
    """The value of one field."""
    return Decoder(**options)({"__key__": "k", field: data})[field]


def tenbin_bytes(*arrays: Any) -> bytes:
    """The arrays as webdataset writes them."""
    return bytes(webdataset.tenbin.encode_buffer(list(arrays)))


def chunk(payload: bytes) -> bytes:
    """One tenbin chunk."""
    return b"~TenBin~" + struct.pack("<q", len(payload)) + payload + bytes(-len(payload) % 64)


def header(code: bytes, *dims: int, rank: int | None = None) -> bytes:
    """One tenbin array header's payload."""
    return struct.pack(f"<8s8sq{len(dims)}q", code, b"", len(dims) if rank is None else rank, *dims)


def test_npy_gives_the_array_when_whole() -> None:
    """Type, shape and values come back; writing to the array changes nothing else."""
    for array in [
        ARRAY, np.asfortranarray(ARRAY), np.float64(3), np.zeros((0, 4)), ARRAY.astype(">f4"),
        np.array(["a", "bcd"]),
    ]:  # fmt: skip
        value = decode("npy", npy_bytes(array))
        assert value.dtype == array.dtype
        assert np.array_equal(value, array)
    for order in ["C", "F"]:
        data = npy_bytes(np.array(ARRAY, order=order))
        value = decode("npy", data)
        value[:] = 9
        assert np.array_equal(decode("npy", data), ARRAY)


def test_npy_raises_when_cut_or_followed_by_bytes() -> None:
    """An npy file that misses bytes is an error, as are bytes after the array, which it counts."""
    for cut in [0, 5, 12, 127, 128, 151]:
        with pytest.raises(DecodingError, match="npy"):
            decode("npy", npy_bytes(ARRAY)[:cut])
    with pytest.raises(DecodingError, match="3 bytes follow"):
        decode("npy", npy_bytes(ARRAY) + b"abc")


def test_npy_raises_when_it_holds_objects() -> None:
    """Pickled objects in npy and npz are refused, whatever is allowed for pickle fields."""
    for allow_pickle in [False, True]:
        objects = np.array([{}, None], dtype=object)
        with pytest.raises(DecodingError, match="Object arrays"):
            decode("npy", npy_bytes(objects), allow_pickle=allow_pickle)
        with pytest.raises(DecodingError, match="Object arrays"):
            decode("npz", npz_bytes(objects), allow_pickle=allow_pickle)


def test_npz_is_a_plain_dict_when_decoded() -> None:
    """An archive becomes a dict in its order, compressed or not; a file without the npy suffix in it stays bytes."""
    out = io.BytesIO()
    np.savez_compressed(out, b=ARRAY, a=ARRAY + 1)
    value = decode("npz", out.getvalue())
    assert type(value) is dict
    assert list(value) == ["b", "a"]
    assert np.array_equal(value["a"], ARRAY + 1)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", npy_bytes(ARRAY))
        archive.writestr("readme", b"text")
    assert decode("npz", out.getvalue())["readme"] == b"text"


def test_npz_raises_when_cut_damaged_or_followed_by_bytes() -> None:
    """An archive that misses bytes, bytes after it, and a wrong checksum within it are errors."""
    for cut in [0, 10, 100, -1]:
        with pytest.raises(DecodingError, match="npz"):
            decode("npz", npz_bytes(ARRAY)[:cut])
    data = npz_bytes(ARRAY)
    with pytest.raises(DecodingError, match="follow"):
        decode("npz", data + b"x")
    place = data.index(ARRAY.tobytes()) + 5
    with pytest.raises(DecodingError, match="CRC"):
        decode("npz", data[:place] + b"\xff" + data[place + 1 :])


def test_npz_raises_when_it_unpacks_to_more_than_the_limit() -> None:
    """A zip bomb is refused before it is unpacked."""
    out = io.BytesIO()
    np.savez_compressed(out, a=np.zeros(100_000))
    with pytest.raises(DecodingError, match="max_bytes=10,000"):
        decode("npz", out.getvalue(), max_bytes=10_000)


def test_tenbin_gives_the_arrays_when_webdataset_wrote_them() -> None:
    """Every type and rank that webdataset writes comes back, writable and aligned."""
    for dtype in DTYPES:
        shapes: list[tuple[int, ...]] = [(), (0,), (3,), (16,), (2, 3, 5), (1,) * 9]
        arrays = [np.full(shape, 7, dtype) for shape in shapes]
        for value, array in zip(decode("ten", tenbin_bytes(*arrays)), arrays, strict=True):
            assert (value.dtype, value.shape) == (array.dtype, array.shape)
            assert np.array_equal(value, array)
            assert value.flags.writeable
            assert value.flags.aligned


def test_tenbin_reads_uint32_and_nothing_when_given() -> None:
    """uint32, which webdataset cannot write, is read; no bytes are no arrays."""
    data = chunk(header(b"u4", 2)) + chunk(np.array([1, 2**32 - 1], "<u4").tobytes())
    assert decode("ten", data)[0].tolist() == [1, 2**32 - 1]
    assert decode("ten", b"") == []


def test_tenbin_raises_when_cut_anywhere() -> None:
    """A cut at any byte, except between two arrays, is an error."""
    one = tenbin_bytes(ARRAY)
    data = one + tenbin_bytes(ARRAY)
    for cut in range(1, len(data)):
        if cut == len(one):
            continue
        with pytest.raises(DecodingError, match="tenbin"):
            decode("ten", data[:cut])


def test_tenbin_raises_when_its_structure_is_wrong() -> None:
    """Wrong magics, sizes, types and dimensions are errors that say which."""
    for data, message in [
        (b"x" * 64, "expected b'~TenBin~' at byte 0"),
        (chunk(header(b"f4", 2)) + b"x" * 80, "expected b'~TenBin~' at byte 80"),
        (b"~TenBin~" + struct.pack("<q", -64) + bytes(64), "-64 bytes"),
        (b"~TenBin~" + struct.pack("<q", 2**62), "0 are left"),
        (chunk(header(b"O8", 1)) + chunk(bytes(8)), "unknown array type 'O8'"),
        (chunk(header(b"f4", 3)) + chunk(bytes(8)), r"takes 12 bytes, found 8"),
        (chunk(header(b"f4", 2)) + chunk(bytes(12)), r"takes 8 bytes, found 12"),
        (chunk(header(b"f4", -1, -2)) + chunk(bytes(8)), "dimensions"),
        (chunk(header(b"f4", 2, rank=1000)) + chunk(bytes(8)), "rank 1000"),
        (chunk(header(b"f4", *[1] * 10)) + chunk(bytes(4)), "rank 10"),
        (chunk(b"f4") + chunk(bytes(4)), "header has 2 bytes"),
    ]:
        with pytest.raises(DecodingError, match=message):
            decode("ten", data)


def test_decode_torch_refuses_when_an_archive_unpacks_to_more_than_the_limit() -> None:
    """A file of torch.save that was compressed into a bomb is refused before it is unpacked."""
    import torch

    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1_000_000), plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name))
    assert len(packed.getvalue()) < 100_000
    with pytest.raises(DecodingError, match="max_bytes"):
        decode_sample({"pth": packed.getvalue()}, max_bytes=1_000_000)
    assert decode_sample({"pth": plain.getvalue()}, max_bytes=1_000)["pth"].shape == (1_000_000,)


def npy_claiming(shape: str, descr: str = "'<f4'") -> bytes:
    """An npy file of a header alone."""
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header


def test_npy_takes_no_memory_when_a_header_claims_it() -> None:
    """A file of 100 bytes is reported as cut off, whatever its header claims, and not as a lack of memory."""
    for shape, descr in [
        ("(1099511627776,)", "'<f4'"),
        ("(1, 1073741824)", "'<f8'"),
        ("(1,)", "'<U500000000'"),
        ("(2,)", "[('a', '<f4', 999999)]"),
    ]:
        for field, data in (("npy", npy_claiming(shape, descr)), ("npz", npz_of(npy_claiming(shape, descr)))):
            tracemalloc.start()
            try:
                with pytest.raises(DecodingError, match=r"cut off: an array of .* takes [0-9,]+ more bytes") as raised:
                    decode(field, data)
                assert tracemalloc.get_traced_memory()[1] < 1 << 20
            finally:
                tracemalloc.stop()
            assert isinstance(raised.value.__cause__, ValueError)


def test_npy_takes_no_time_and_memory_when_its_values_have_no_bytes() -> None:
    """So many values of no bytes each are claimed, not stored."""
    for descr in ["'|V0'", "'|S0'", "'<U0'"]:
        data = npy_claiming("(1099511627776,)", descr)
        for field, content in (("npy", data), ("npz", npz_of(data))):
            with pytest.raises(DecodingError, match="claims too many values, of no bytes each"):
                decode(field, content)


def npz_of(data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.npy", data)
    return out.getvalue()


@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_npy_equals_numpy_when_a_type_is_unusual() -> None:
    """All three versions of the format, and types without bytes."""
    for dtype, order in itertools.product(
        [[("é", "<f4"), ("b", "<i2", (2,))], [("日本", "<f4")], "V0", ">i8", "M8[s]"], ["C", "F"]
    ):
        array = np.zeros((2, 3), dtype, order=order)
        out = io.BytesIO()
        np.lib.format.write_array(out, array)
        found = decode("npy", out.getvalue())
        expected = np.lib.format.read_array(io.BytesIO(out.getvalue()))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes("A") == expected.tobytes("A")
        assert (found.flags.writeable, found.flags.f_contiguous) == (True, expected.flags.f_contiguous)
