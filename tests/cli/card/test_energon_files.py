"""``wds card --energon``: what ``energon prepare`` writes."""

import json
import sqlite3
import struct
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from tests.format.index.test_foreign import ENERGON
from tests.kits.shards import Members, sample_members, write_tar
from tests.kits.tar_blocks import END, pax_sparse
from tests.kits.tool_kit import run_wds
from torchdata_wds import index_shard

TWO: Members = [*sample_members("a/1", jpg=b"x" * 700, cls=b"1"), *sample_members("a/2", jpg=b"", cls=b"22")]
ONE: Members = [("README", b"not of a sample"), *sample_members("b/1", jpg=b"x", cls=b"3")]


def rows(folder: Path, table: str) -> list[Any]:
    """The rows of a table of ``index.sqlite``."""
    with closing(sqlite3.connect(folder / ".nv-meta/index.sqlite")) as database:
        return database.execute(f"SELECT * FROM {table}").fetchall()


def test_energon_files_have_the_places_of_samples_and_fields_when_written(tmp_path: Path) -> None:
    """As energon 7.4 wrote them for these shards."""
    write_tar(tmp_path / "train-0.tar", TWO)
    write_tar(tmp_path / "val-0.tar", ONE)
    assert run_wds("card", "-p", 1, "--energon", f"{tmp_path}/*.tar").status == 0
    meta = tmp_path / ".nv-meta"
    assert sorted(path.name for path in meta.iterdir()) == [
        ".info.json", "dataset.yaml", "index.sqlite", "index.uuid", "split.yaml",
    ]  # fmt: skip
    assert json.loads((meta / ".info.json").read_text()) == {"shard_counts": {"train-0.tar": 2, "val-0.tar": 1}}
    assert yaml.safe_load((meta / "dataset.yaml").read_text()) == {
        "__module__": "megatron.energon",
        "__class__": "CrudeWebdataset",
    }
    parts = {"train": ["train-0.tar"], "val": ["val-0.tar"]}
    assert yaml.safe_load((meta / "split.yaml").read_text()) == {"split_parts": parts, "exclude": []}
    assert rows(tmp_path, "samples") == [(0, "a/1", 0, 0, 2560), (0, "a/2", 1, 2560, 1536), (1, "b/1", 0, 1024, 2048)]
    assert rows(tmp_path, "sample_parts")[:3] == [
        (0, 0, "jpg", 512, 700),
        (0, 0, "cls", 2048, 1),
        (0, 1, "jpg", 3072, 0),
    ]
    assert (tmp_path / "train-0.tar.idx").read_bytes() == struct.pack("<3Q", 0, 2560, 4096)
    first = uuid.UUID((meta / "index.uuid").read_text())
    assert run_wds("card", "-p", 1, "--energon", "--check", f"{tmp_path}/*.tar").status == 0
    index = index_shard(tmp_path / "val-0.tar", to=False)
    index.header = index.header._replace(special=None)
    index.save(tmp_path / "val-0.tar.index")  # of an older version, which did not look for hard links
    assert run_wds("card", "-p", 1, "--energon", "--check", f"{tmp_path}/*.tar").status == 0
    write_tar(tmp_path / "val-0.tar", sample_members("c", jpg=b"", cls=b""))
    assert run_wds("card", "-p", 1, "--energon", "--force", f"{tmp_path}/*.tar").status == 0
    assert uuid.UUID((meta / "index.uuid").read_text()) != first


def test_offsets_are_those_of_energon(tmp_path: Path) -> None:
    """Extended headers go with their samples; what follows the last sample, energon counts to it."""
    for name, (members, layout, offsets) in ENERGON.items():
        shard = write_tar(tmp_path / f"{name}.tar", members, tar_format=layout)
        assert run_wds("card", "-p", 1, "--energon", shard, "--no-croissant", "--force").status == 0
        written = struct.unpack(f"<{len(offsets)}Q", Path(f"{shard}.idx").read_bytes())
        assert list(written) == [*offsets[:-1], offsets[-1] - (1024 if name == "gaps" else 0)]


def test_sample_type_and_ratio_are_written_when_given(tmp_path: Path) -> None:
    """Shards are divided in their order, as energon does; fields may have alternatives and places in json."""
    for number in range(5):
        write_tar(tmp_path / f"{number}.tar", sample_members(f"k{number}", jpg=b"", json=b"{}"))
    sample = ("--energon-sample", "CaptioningSample:image=png,jpg,caption=json[text]")
    ratio = ("--energon-ratio", "6,2,2")
    done = run_wds("card", "-p", 1, "--energon", f"{tmp_path}/*.tar", *sample, *ratio)
    assert (done.status, "no sample has a field 'png' for image; there are jpg, json" in done.err) == (2, True)
    write_tar(tmp_path / "4.tar", sample_members("k4", png=b"", json=b"{}"))
    assert run_wds("card", "-p", 1, "--energon", f"{tmp_path}/*.tar", *sample, *ratio).status == 0
    assert yaml.safe_load((tmp_path / ".nv-meta/dataset.yaml").read_text()) == {
        "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
        "field_map": {"image": "png,jpg", "caption": "json[text]"},
    }
    again = run_wds("card", "-p", 1, "--energon", f"{tmp_path}/*.tar", "--check", *ratio)
    assert again.status == 0, again.text  # dataset.yaml stays as it is
    parts = yaml.safe_load((tmp_path / ".nv-meta/split.yaml").read_text())["split_parts"]
    assert parts == {"train": ["0.tar", "1.tar", "2.tar"], "val": ["3.tar"], "test": ["4.tar"]}


def test_energon_files_are_refused_when_energon_could_not_read_the_shards(tmp_path: Path) -> None:
    """Nothing is written then."""
    write_tar(tmp_path / "a.tar", TWO)
    write_tar(tmp_path / "b.tar", TWO[2:])
    write_tar(tmp_path / "empty.tar", [])
    write_tar(tmp_path / "{x}.tar", TWO)
    (tmp_path / "sparse.tar").write_bytes(pax_sparse([(0, 512)], 4096, b"x" * 512) + END)
    (tmp_path / "x.tar.gz").write_bytes((tmp_path / "a.tar").read_bytes())
    for names, told in (
        (("a.tar", "b.tar"), "'a/2' is in a.tar and in b.tar"),
        (("empty.tar",), "it has no sample"),
        (("?x?.tar",), "its name has braces"),
        (("sparse.tar",), "it has sparse. Write it anew"),
        (("x.tar.gz",), "only uncompressed files named *.tar"),
    ):
        done = run_wds("card", "-p", 1, "--energon", *(tmp_path / name for name in names))
        assert (done.status, told in done.err) == (1, True), done.err
        assert not (tmp_path / "README.md").exists()
