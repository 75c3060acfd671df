"""Data sets prepared by ``wds card`` alone, read by the programs that its files are for.

They are installed into an environment of their own, beside what is installed here, as nothing else needs them.
"""

import gzip
import hashlib
import json
import os
import sqlite3
import subprocess
import sysconfig
import venv
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from braceexpand import braceexpand

from tests.kits import card_readers
from tests.kits.shards import grouped, image_samples, sample_members, text_samples, write_tar
from tests.kits.tool_kit import run_wds
from torchdata_wds.cli.card.field_kinds import kind_of

PACKAGES = ("datasets>=4", "mlcroissant>=1", "megatron-energon>=7")
SHARDS = {"train-0.tar": 6, "train-1.tar": 3, "val-0.tar": 2}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that has the readers, and through a .pth file what is installed here; skips where pip has none."""
    folder = tmp_path_factory.mktemp("readers")
    venv.create(folder, with_pip=True, symlinks=True)
    program = str(folder / "bin/python")
    outer = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    inner = next(folder.glob("lib*/python*/site-packages"))
    (inner / "outer.pth").write_text("".join(f"{path}\n" for path in sorted(outer)))
    command = [program, "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(PACKAGES)}: {done.stderr.strip().splitlines()[-1:]}")
    return program


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of shards with the files of ``wds card``."""
    folder = tmp_path_factory.mktemp("good")
    for name, count in SHARDS.items():
        write_tar(folder / name, image_samples(f"{name[:-4]}/", count))
    assert run_wds("card", "-p", 1, "--energon", f"{folder}/*.tar").status == 0
    return folder


def read(python: str, reader: str, folder: Path) -> Any:
    """What a reader found."""
    homes = {"HF_HOME": f"{folder}/.hf", "CROISSANT_CACHE": f"{folder}/.croissant", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **homes, "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [python, "-W", "ignore", card_readers.__file__, reader, str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def expected(split: str) -> dict[str, dict[str, bytes]]:
    """The fields of the samples of a split, by key."""
    return {
        key: fields
        for name, count in SHARDS.items()
        if name.startswith(split)
        for key, fields in grouped(image_samples(f"{name[:-4]}/", count)).items()
    }


def test_datasets_reads_the_set_when_it_has_a_card(python: str, prepared: Path) -> None:
    """By the card, and by the builder's own look at the shards: same samples; its lists of suffixes are ours."""
    found = read(python, "hub", prepared)
    assert found["card"] == found["bare"]
    for split, part in (("train", "train"), ("validation", "val")):
        wanted = expected(part)
        rows = {row["__key__"]: row for row in found["card"][split]}
        assert rows.keys() == wanted.keys()
        for key, row in rows.items():
            assert row["jpg"] == hashlib.sha256(wanted[key]["jpg"]).hexdigest()
            assert (row["cls"], row["json"]) == (int(wanted[key]["cls"]), json.loads(wanted[key]["json"]))
    kinds = {"IMAGE": "image", "AUDIO": "audio", "VIDEO": "video", "MESH": "mesh"}
    for name, suffixes in found["suffixes"].items():
        for suffix in set(suffixes) - {"mpeg"}:
            assert kind_of(suffix) in ((kinds[name],) if name in kinds else ("text", "integer", "json", "other")), (
                suffix
            )


def test_datasets_reads_samples_with_other_fields_when_the_card_declares_them(python: str, tmp_path: Path) -> None:
    """Without the card it refuses them; with a field whose type only its content shows, the card warns of that."""
    members = [*sample_members("a", txt=b"x", cls=b"1"), *sample_members("b", txt=b"y")]
    url = write_tar(tmp_path / "x.tar", members)
    assert "warning" not in run_wds("card", "-p", 1, url).err
    found = read(python, "hub", tmp_path)
    assert "don't share the same prefix or the same types" in found["bare"]
    rows = [(row["__key__"], row["txt"], row["cls"]) for row in found["card"]["train"]]
    assert rows == [("a", "x", 1), ("b", "y", None)]
    write_tar(tmp_path / "x.tar", [*members, *text_samples("s", 1)])
    assert "has other fields than the first" in run_wds("card", "-p", 1, url, "--force").err
    assert "don't share the same prefix or the same types" in read(python, "hub", tmp_path)["card"]


def test_mlcroissant_reads_each_field_when_it_has_croissant_json(python: str, prepared: Path) -> None:
    """It finds no error, checks the digests, and gives keys and contents."""
    found = read(python, "croissant", prepared)
    assert found["errors"] == []
    for split, part in (("train", "train"), ("validation", "val")):
        wanted = expected(part)
        assert found["sets"][f"{split}/cls"] == sorted([key, int(fields["cls"])] for key, fields in wanted.items())
        assert found["sets"][f"{split}/jpg"] == sorted([key, [16, 12]] for key in wanted)
        digests = [[key, hashlib.sha256(fields["json"]).hexdigest()] for key, fields in wanted.items()]
        assert found["sets"][f"{split}/json"] == sorted(digests)


def test_energon_reads_the_set_and_would_have_written_the_same_files(python: str, prepared: Path) -> None:
    """Offsets byte by byte, tables row by row; then with a sample type."""
    found = read(python, "energon", prepared)
    labels = {
        part: sorted([key, int(fields["cls"])] for key, fields in expected(part).items()) for part in ("train", "val")
    }
    for part, wanted in labels.items():
        assert sorted(found["samples"][part]) == [[*pair, [3, 12, 16]] for pair in wanted]
    theirs = Path(found["prepared"])
    for name in SHARDS:
        assert (prepared / f"{name}.idx").read_bytes() == (theirs / f"{name}.idx").read_bytes()
    assert tables(prepared) == tables(theirs)
    info, written = (json.loads((folder / ".nv-meta/.info.json").read_text()) for folder in (theirs, prepared))
    assert info.pop("energon_version")
    assert written == info
    splits = [yaml.safe_load((folder / ".nv-meta/split.yaml").read_text()) for folder in (prepared, theirs)]
    for split in splits:
        split["split_parts"] = {
            part: [name for names in listed for name in braceexpand(names)]
            for part, listed in split["split_parts"].items()
        }
    assert splits[0] == splits[1]
    sample = ("--energon-sample", "ImageClassificationSample:image=jpg,label=cls")
    assert run_wds("card", "-p", 1, "--energon", "--force", *sample, f"{prepared}/*.tar").status == 0
    for part, rows in read(python, "energon", prepared)["samples"].items():
        assert sorted(rows) == [[*pair, [3, 12, 16]] for pair in labels[part]]


def test_readers_take_odd_names_and_fields(python: str, tmp_path: Path) -> None:
    """Blanks, other letters, folders, a field whose name ends in another's, and one that is compressed."""
    (tmp_path / "my data").mkdir()
    for number in range(2):
        key = f"d {number}/\u00fc"
        fields = {"CLS": b"3", "dat": b"\x00\xff", "seg.dat": b"", "txt.gz": gzip.compress(b"hi"), "note.txt": b"?"}
        write_tar(tmp_path / f"my data/x {number}.tar", sample_members(key, **fields))
    done = run_wds("card", "-p", 1, f"{tmp_path}/my data/*.tar", "-o", tmp_path, "--name", "It's: #1", "--split", "a.b")
    assert (done.status, "warning" in done.err) == (0, False)
    rows = read(python, "hub", tmp_path)["card"]["a.b"]
    dat = hashlib.sha256(b"\x00\xff").hexdigest()
    assert [row["__key__"] for row in rows] == ["d 0/\u00fc", "d 1/\u00fc"]
    assert [(row["CLS"], row["dat"], row["txt.gz"], row["note.txt"]) for row in rows] == [(3, dat, "hi", "?")] * 2
    found = read(python, "croissant", tmp_path)
    assert found["errors"] == []
    assert found["sets"]["a.b/CLS"] == [["d 0/\u00fc", 3], ["d 1/\u00fc", 3]]
    assert found["sets"]["a.b/seg.dat"] == [
        [f"d {number}/\u00fc", hashlib.sha256(b"").hexdigest()] for number in range(2)
    ]
    assert {"a.b/dat", "a.b/txt.gz", "a.b/note.txt"} < found["sets"].keys()


def tables(folder: Path) -> list[Any]:
    """What ``index.sqlite`` has: rows, tables and indexes, spaces in their definitions apart."""
    with closing(sqlite3.connect(folder / ".nv-meta/index.sqlite")) as database:
        queries = ("SELECT * FROM samples ORDER BY rowid", "SELECT * FROM sample_parts ORDER BY rowid")
        rows = [database.execute(query).fetchall() for query in queries]
        schema = database.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
        return [*rows, [(name, "".join((sql or "").split())) for name, sql in schema]]
