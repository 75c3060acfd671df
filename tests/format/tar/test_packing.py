"""Samples to tar blocks, and which keys and fields may be written."""

import io
import subprocess
import tarfile
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kits.shards import END, text_samples
from tests.test_interop import needs_gnu_tar
from torchdata_wds import EncodingError, MissingFieldError, SampleError
from torchdata_wds.format.shards import ShardFile
from torchdata_wds.format.tar import packing, read_members
from torchdata_wds.format.tar.packing import SamplePacker


def archive(*samples: dict[str, Any], **options: Any) -> bytes:
    """The blocks of some samples, with an end marker."""
    packer = SamplePacker(**options)
    return b"".join(part for sample in samples for part in packer.pack(sample).parts) + END


def entries(data: bytes) -> list[tarfile.TarInfo]:
    """What tarfile finds."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getmembers()


def with_devices(data: bytes) -> bytes:
    """An archive with the device numbers of plain files, zeros, which GNU tar leaves out from 1.35 on."""
    made = bytearray(data)
    for entry in entries(data):
        header = made[entry.offset : entry.offset + 512]
        header[329:345] = b"0000000\0" * 2
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        made[entry.offset : entry.offset + 512] = header
    return bytes(made)


def test_pack_sorts_fields_and_leaves_metadata_out() -> None:
    """The order of a dict does not matter; names like __url__ are not written."""
    one = archive({"txt": b"A", "__key__": "d/a", "__url__": "x.tar", "cls": b"1", "__pad__": True})
    assert one == archive({"cls": b"1", "txt": b"A", "__key__": "d/a"})
    assert [entry.name for entry in entries(one)] == ["d/a.cls", "d/a.txt"]


def test_pack_sets_what_was_asked_for_in_headers() -> None:
    """Owner, permissions and time are those given, and the same for all."""
    (entry,) = entries(archive({"__key__": "a", "x": b"1"}, mode=0o640, user="me", group="us", mtime=12345.9))
    assert (entry.mode, entry.uname, entry.gname, entry.mtime, entry.uid) == (0o640, "me", "us", 12345, 0)
    (entry,) = entries(archive({"__key__": "a", "x": b"1"}))
    assert (entry.mode, entry.uname, entry.gname, entry.mtime, entry.type) == (0o444, "bigdata", "bigdata", 0, b"0")


LONG_KEYS = [
    *("a", "train.v1/22.0/1", "x" * 96, "x" * 97, "d" * 155 + "/" + "n" * 96, "d" * 156 + "/" + "n"),
    *("d" * 50 + "/" + "n" * 97, "ü" * 48, "日" * 60 + "/" + "本" * 30),
    *("a\\b", "a b\tc\nd", " a", "-", "...d/a", "x__/a"),
]


def test_pack_is_read_back_when_keys_are_long_or_odd() -> None:
    """Our reader, tarfile and the packer agree on names, content and places."""
    for key, size in product(LONG_KEYS, (0, 1, 511, 512, 513)):
        sample = {"__key__": key, "txt": bytes(range(256)) * 2 + b"x", "bin": b"\xff" * size}
        packed = SamplePacker().pack(sample)
        data = b"".join(packed.parts)
        assert packed.size == len(data)
        assert len(data) % 512 == 0
        expected = [(f"{key}.bin", sample["bin"]), (f"{key}.txt", sample["txt"])]
        assert [(member.name, member.data) for member in read_members(io.BytesIO(data + END), "x.tar")] == expected
        with tarfile.open(fileobj=io.BytesIO(data + END)) as tar:
            assert [(entry.name, tar.extractfile(entry).read()) for entry in tar] == expected  # type: ignore[union-attr]
        assert [(name, data[offset : offset + size]) for name, offset, size in packed.members()] == expected


def test_pack_uses_one_block_of_header_where_ustar_has_room() -> None:
    """Only what does not fit takes an extended header."""
    sizes = {key: SamplePacker().pack({"__key__": key, "x": b""}).size for key in ("k" * 98, "k" * 99, "d/" + "k" * 98)}
    assert list(sizes.values()) == [512, 1536, 512]


def test_pack_gives_a_size_record_when_a_member_is_too_large_for_octal_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB and more stand in an extended header; a lower limit shows it here."""
    monkeypatch.setattr(packing, "_TOO_LARGE", 8)
    data = archive({"__key__": "a", "x": b"12345678"})
    assert b"size=8\n" in data
    assert [member.data for member in read_members(io.BytesIO(data), "x.tar")] == [b"12345678"]
    assert [entry.size for entry in entries(data)] == [8]


@needs_gnu_tar
def test_shards_take_the_same_bytes_as_gnu_tar_when_samples_are_tiny(tmp_path: Path) -> None:
    """100 samples give the very file that GNU tar makes of them in its ustar format."""
    folder, shard = tmp_path / "tree", tmp_path / "ours.tar"
    folder.mkdir()
    members = text_samples("s", 100)
    for name, data in members:
        (folder / name).write_bytes(data)
    owner = ["--owner=bigdata:0", "--group=bigdata:0", "--mode=0444", "--mtime=@0"]
    names = sorted(name for name, _ in members)
    command = ["tar", "--format=ustar", *owner, "-cf", str(tmp_path / "gnu.tar"), "-C", str(folder), *names]
    subprocess.run(command, check=True, timeout=30)
    packer, file = SamplePacker(), ShardFile(shard)
    for number in range(100):
        fields = {name.partition(".")[2]: data for name, data in members[3 * number : 3 * number + 3]}
        file.append(packer.pack({"__key__": f"s{number:05d}", **fields}))
    file.close()
    assert shard.read_bytes() == with_devices((tmp_path / "gnu.tar").read_bytes())


BAD_KEYS: dict[Any, str] = {
    "": "empty",
    "a.b": "has a dot.*'a_b'",
    "d/a.b": "has a dot",
    ".a": "has a dot",
    "d/.": "has a dot",
    "/a": "absolute",
    "../a": r"'\.\.'",
    "a/../b": r"'\.\.'",
    "..": r"'\.\.'",
    "a/..": r"'\.\.'",
    "a/": "ends in a slash",
    "./a": r"leading '\./'",
    "__meta__/a": "form __x__",
    "__MACOSX/a": "macOS",
    "a\0": "NUL",
    "a\ud800": "surrogate",
}


def test_pack_refuses_keys_that_could_not_be_read_back() -> None:
    """The message names the key and the reason."""
    for key, reason in BAD_KEYS.items():
        with pytest.raises(SampleError, match=f"(?s).*{reason}") as caught:
            SamplePacker().pack({"__key__": key, "txt": b""})
        assert repr(key) in str(caught.value)
        assert caught.value.key == key


def test_pack_refuses_keys_that_are_missing_or_no_str() -> None:
    """Without __key__ a field is missing; a number is no key."""
    for sample in ({"txt": b""}, {"__key__": None, "txt": b""}):
        with pytest.raises(MissingFieldError, match="no __key__"):
            SamplePacker().pack(sample)
    with pytest.raises(SampleError, match=r"17, of type int.*str"):
        SamplePacker().pack({"__key__": 17, "txt": b""})
    with pytest.raises(SampleError, match=r"b.a., of type bytes.*str"):
        SamplePacker().pack({"__key__": b"a", "txt": b""})


def test_pack_refuses_fields_that_could_not_be_read_back() -> None:
    """The message names sample, field and reason."""
    reasons = {"": "empty", "a/b": "slash", "a\0": "NUL", "JPG": "'jpg', in lower case", "x\ud800": "surrogate"}
    for field, reason in reasons.items():
        with pytest.raises(SampleError, match=reason) as caught:
            SamplePacker().pack({"__key__": "k1", field: b""})
        assert repr(field) in str(caught.value)
        assert "'k1'" in str(caught.value)
        assert (caught.value.key, caught.value.field) == ("k1", field)


def test_pack_refuses_fields_that_are_no_str() -> None:
    """A number is no name of a field."""
    with pytest.raises(SampleError, match="field 3 of sample 'k' is of type int"):
        SamplePacker().pack({"__key__": "k", 3: b""})  # type: ignore[dict-item]


def test_pack_accepts_upper_case_when_lowercase_is_off() -> None:
    """Shards for readers with lowercase=False."""
    assert SamplePacker(lowercase=False).pack({"__key__": "a", "JPG": b""}).names == [b"a.JPG"]


def test_pack_refuses_samples_without_a_field() -> None:
    """A sample of metadata alone would vanish."""
    for sample in ({"__key__": "k1"}, {"__key__": "k1", "__url__": "x.tar"}):
        with pytest.raises(MissingFieldError, match="'k1' has no field to write"):
            SamplePacker().pack(sample)


def test_pack_refuses_values_that_are_not_bytes() -> None:
    """The message names sample and field, and says what there is."""
    for value, found in ((None, "found None"), ("text", "type str"), (7, "type int"), ([b""], "type list")):
        with pytest.raises(EncodingError, match=f"field 'txt' of sample 'k1' .*{found}"):
            SamplePacker().pack({"__key__": "k1", "txt": value, "cls": b"1"})


def test_pack_takes_every_kind_of_bytes() -> None:
    """Bytearray and memoryview are written as bytes are."""
    array = memoryview(bytearray(range(8))).cast("H")
    packed = SamplePacker().pack({"__key__": "a", "x": bytearray(b"12"), "y": array})
    assert packed.parts[1] == b"12"
    assert packed.parts[4] == bytes(range(8))


def test_pack_keeps_no_more_than_some_combinations_of_fields() -> None:
    """Ever new field names do not fill the memory."""
    packer = SamplePacker()
    for number in range(2500):
        packer.pack({"__key__": "a", f"f{number}": b""})
    assert len(packer._plans) <= 1000


def test_packer_refuses_options_that_do_not_fit() -> None:
    """The option is named; the type is wrong, or the value."""
    types = [("mode", "0444"), ("mode", True), ("mtime", None), ("user", 0)]
    values = [("mode", 0o10000), ("mode", -1), ("mtime", -1), ("mtime", float("nan")), ("mtime", 8**11)]
    for error, rows in ((TypeError, types), (ValueError, [*values, ("user", "x" * 32), ("group", "a\0")])):
        for name, value in rows:
            with pytest.raises(error, match=name):
                SamplePacker(**{name: value})  # type: ignore[arg-type]


KEYS = [
    "a",
    "b/c",
    "d.v1/e",
    "é",
    "x" * 95,
    "x" * 99,
    "y/" * 60 + "z",
    "\n",
    "a\nb",
    "__x__/a",
    "b.c",
    "/a",
    "a/",
    "./a",
]


def some_samples(random: Random) -> list[dict[str, Any]]:
    """Samples as they are, and as they should not be."""
    odd = random.random() < 0.5
    samples: list[dict[str, Any]] = []
    for number in range(random.randint(1, 12)):
        key = (
            random.choice(KEYS)
            if odd and random.random() < 0.1
            else f"{random.choice(KEYS[: 7 if odd else 4])}{number}"
        )
        fields = random.choice([["txt", "cls"], ["cls", "txt"], ["txt"], ["seg.png", "txt", "json"], ["a"] * (not odd)])
        sample: dict[str, Any] = {"__key__": key, "__url__": "x.tar"}
        sample |= {field: random.randbytes(random.choice([0, 1, 511, 512, 513, 5000])) for field in fields}
        if odd and random.random() < 0.1:
            sample |= random.choice([{"TXT": b""}, {"": b""}, {"a/b": b""}, {"n": "text"}, {"m": memoryview(b"m")}])
        if odd and random.random() < 0.05:
            sample["__key__"] = random.choice([None, 5, "", "\0", "\udc80"])
        if odd and random.random() < 0.05:
            del sample["__key__"]
        samples.append(sample)
    return samples


def test_samples_packed_together_are_those_packed_one_by_one() -> None:
    """Bytes, keys and size; None wherever one of them is wrong, and seldom else."""
    together = 0
    for seed in range(600):
        random = Random(seed)
        samples = some_samples(random)
        options = {"mode": random.choice([0o444, 0o600]), "mtime": random.choice([0, 2e9]), "lowercase": seed % 3 > 0}
        packed = SamplePacker(**options).pack_all(samples)  # type: ignore[arg-type]
        packer = SamplePacker(**options)  # type: ignore[arg-type]
        try:
            singles = [packer.pack(sample) for sample in samples]
        except SampleError:
            assert packed is None
            continue
        if packed is None:
            continue
        together += 1
        assert packed.keys == [single.key for single in singles]
        assert b"".join(packed.parts) == b"".join(part for single in singles for part in single.parts)
        assert packed.size == sum(single.size for single in singles)
    assert together > 100


def test_shard_takes_samples_together_only_if_their_keys_are_new() -> None:
    """Keys that come twice are left to `append`, which says what is wrong."""
    out = io.BytesIO()
    shard = ShardFile(out, name="x.tar")
    packer = SamplePacker()

    def extend(*keys: str) -> bool:
        packed = packer.pack_all([{"__key__": key, "txt": b"A"} for key in keys])
        assert packed is not None
        return shard.extend(packed)

    assert extend("a", "b")
    assert not extend("c", "b")
    assert not extend("c", "c")
    assert extend("c")
    shard.close()
    assert [member.name for member in read_members(io.BytesIO(out.getvalue()), "x.tar")] == ["a.txt", "b.txt", "c.txt"]
