"""What users of tar, tarp and tarproc do with shards, as ``wds`` does it."""

import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.kits.tool_kit import EXAMPLE_SAMPLES, read_samples, run_wds, write_example_folder

TRAIN = "train-{000000..000003}.tar"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with shards, images, a recipe and a plan."""
    write_example_folder(tmp_path)
    monkeypatch.chdir(tmp_path)


def wds(*arguments: object, stdin: bytes = b"") -> bytes:
    """What a command that succeeds writes to standard output."""
    done = run_wds(*arguments, stdin=stdin)
    assert done.status == 0, done.err
    return done.out


def everything() -> list[dict[str, Any]]:
    """All samples of the shards, read independently."""
    return [sample for path in sorted(Path().glob("train-*.tar")) for sample in read_samples(path)]


def test_tar_sort_by_name() -> None:
    """``tar --sort=name -cf images.tar images``: members of a sample are together, in order."""
    wds("create", "images", "-o", "images.tar")
    with tarfile.open("images.tar") as tar:
        assert tar.getnames() == sorted(str(path.relative_to("images")) for path in Path("images").rglob("*.*"))


def test_tarp_create() -> None:
    """``tarp create recipe.txt -o out.tar``: a line per member, from files and texts."""
    wds("create", "recipe.txt", "-o", "out.tar")
    assert [(sample["__key__"], sample["cls"]) for sample in read_samples("out.tar")] == [
        ("cat/1", b"0"), ("cat/2", b"1"), ("dog/1", b"2")
    ]  # fmt: skip


def test_tarcreate_with_a_plan() -> None:
    """``tarcreate plan.tsv out.tar``: a row per sample."""
    wds("create", "plan.tsv", "-o", "out.tar")
    assert [sample["txt"] for sample in read_samples("out.tar")] == [
        b"this is cat/1",
        b"this is cat/2",
        b"this is dog/1",
    ]


def test_tarscat_count() -> None:
    """``tarscat -c 10 train-{000000..000003}.tar``: the first so many, from two shards here."""
    assert read_samples(wds("cat", "-c", 12, TRAIN)) == everything()[:12]


def test_tar2tsv_of_a_field() -> None:
    """``tarscat -c 10 ... | tar2tsv -f cls``: a header, then key and class."""
    rows = wds("tsv", "-f", "cls", stdin=wds("cat", "-c", 10, TRAIN)).decode().splitlines()
    assert [row.split("\t") for row in rows] == [
        ["__key__", "cls"],
        *([sample["__key__"], sample["cls"].decode()] for sample in everything()[:10]),
    ]


def test_tarsplit_by_size() -> None:
    """``tarsplit -s 1e9 -o name --maxshards 2``: numbered shards, none too large, and a clean end."""
    joined = wds("cat", TRAIN)
    assert wds("split", "-s", "1e9", "-o", "name", "--max-shards", 2, stdin=joined) == b"name-000000.tar\n"
    assert read_samples("name-000000.tar") == everything()
    assert wds("split", "-s", "50e3", "-o", "part", "--max-shards", 2, stdin=joined).splitlines() == [
        b"part-000000.tar",
        b"part-000001.tar",
    ]
    found = [read_samples(f"part-00000{number}.tar") for number in range(2)]
    assert all(Path(f"part-00000{number}.tar").stat().st_size <= 50_000 for number in range(2))
    assert found[0] + found[1] == everything()[: len(found[0]) + len(found[1])]
    assert 0 < len(found[0]) < EXAMPLE_SAMPLES


def test_tarshow_of_the_first_two() -> None:
    """``tarshow -c 2 train-000000.tar``: their keys and fields, and no others."""
    shown = wds("show", "-c", 2, "train-000000.tar").decode()
    assert [f"0/{number:06d}" in shown for number in range(3)] == [True, True, False]
    assert all(word in shown for word in ("jpg", "cls", "picture 1"))


def test_tarproc_in_parallel() -> None:
    """``tarproc -p 5 -c '...'``: each sample in its folder; here the order is kept."""
    data = wds("proc", "-p", 5, "-c", "tr a-z A-Z < sample.txt > sample.upper && rm sample.jpg", "-o", "-", TRAIN,
               "--slice", ":8")  # fmt: skip
    expected = [
        {**{field: sample[field] for field in ("__key__", "cls", "json", "txt")}, "upper": sample["txt"].upper()}
        for sample in everything()[:8]
    ]
    assert read_samples(data) == expected


def test_tarsort_by_a_field() -> None:
    """``tarsort -s cls -S int``: equal classes all stay, in their order."""
    found = read_samples(wds("sort", "-k", "cls", "--type", "int", TRAIN, "-o", "-"))
    assert found == sorted(everything(), key=lambda sample: int(sample["cls"]))


def test_tarsort_shuffled() -> None:
    """``tarsort -S shuffle``: another order, the same each time."""
    found = read_samples(wds("sort", "--type", "shuffle", "--seed", 1, TRAIN, "-o", "-"))
    assert found != everything()
    assert sorted(found, key=lambda sample: str(sample["__key__"])) == everything()
    assert found == read_samples(wds("sort", "--type", "shuffle", "--seed", 1, TRAIN, "-o", "-"))


def test_tarfirst_that_meets_a_condition() -> None:
    """``tarfirst -f jpg -S "_['cls'] == b'3'"``: the bytes of a field, and nothing is evaluated."""
    expected = next(sample for sample in everything() if sample["cls"] == b"3")
    assert wds("first", "-f", "jpg", "--where", "cls=3", TRAIN) == expected["jpg"]


def test_tarpcat_reads_every_shard_once() -> None:
    """``tarpcat -p 2 ...``: also where there are more shards than readers."""
    assert read_samples(wds("cat", "-p", 2, TRAIN, "-o", "-")) == everything()


def test_augment_wds_over_all_shards() -> None:
    """``dask.delayed(augment_wds)(input, output)`` for each shard: a function of the user's own module."""
    wds("map", "augment:augment", TRAIN, "-o", "augmented/", "--workers", 0)
    found = [sample for path in sorted(Path("augmented").iterdir()) for sample in read_samples(path)]
    assert len(found) == EXAMPLE_SAMPLES
    for sample, before in zip(found, everything(), strict=True):
        assert {name: sample[name] for name in ("__key__", "cls", "txt")} == {
            name: before[name] for name in ("__key__", "cls", "txt")
        }
        assert sample["jpg"] != before["jpg"]
