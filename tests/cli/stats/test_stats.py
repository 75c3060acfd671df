"""The command ``stats``: what it counts, from every kind of input, as text and JSON."""

import gzip
import json
from collections import Counter
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest
from PIL import Image

from tests.kits.servers import serve_folder
from tests.kits.shards import image_file, jpeg_bytes, sample_members, tar_bytes, write_tar, write_text_shards
from tests.kits.tool_kit import read_samples, run_wds

SIZES = ((16, 12), (16, 12), (640, 480))


def figures_of(*arguments: object, status: int = 0, **options: Any) -> dict[str, Any]:
    """What ``--json -`` says."""
    done = run_wds("stats", "--json", "-", *arguments, **options)
    assert done.status == status, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def members() -> list[tuple[str, bytes]]:
    """Twelve samples with images of two sizes and four labels; two samples are odd."""
    made: list[tuple[str, bytes]] = []
    for number in range(12):
        fields = {"jpg": jpeg_bytes(number, SIZES[number % 3]), "cls": b"%d\n" % (number % 4), "txt": b"t" * number * 9}
        made += sample_members(f"s{number:02d}", **fields)
    made += sample_members("odd1", jpg=b"no image", cls=b"0", npy=b"")
    return [*made, *sample_members("odd2", png=image_file(Image.new("I;16", (3, 2))))]


def oddities_of(found: dict[str, Any]) -> dict[str, tuple[int, list[str]]]:
    """Number and keys of the examples, by kind; the kinds must differ."""
    rows = [(odd["kind"], (odd["number"], [place["key"] for place in odd["examples"]])) for odd in found["oddities"]]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shard of `members`."""
    return write_tar(tmp_path_factory.mktemp("stats") / "x.tar", members())


def test_stats_counts_what_the_standard_library_reads(shard: str) -> None:
    """Samples, bytes, and the sizes of each field."""
    samples = read_samples(Path(shard))
    found = figures_of(shard)
    assert (found["samples"], found["bytes"]) == (14, sum(len(data) for _, data in members()))
    assert {field["field"] for field in found["fields"]} == {"jpg", "cls", "txt", "npy", "png"}
    for field in found["fields"]:
        sizes = [len(sample[field["field"]]) for sample in samples if field["field"] in sample]
        given = field["sizes"]
        assert field["samples"] == len(sizes) == sum(given["histogram"]["counts"])
        assert [given[name] for name in ("minimum", "median", "maximum", "total")] == [
            min(sizes),
            median_low(sizes),
            max(sizes),
            sum(sizes),
        ]


def test_stats_reads_sizes_and_modes_of_images_from_their_headers(shard: str) -> None:
    """Those of 16 bits too; a file that is not an image is counted, with the reason."""
    fields = {field["field"]: field["images"] for field in figures_of(shard)["fields"]}
    assert (fields["jpg"]["images"], fields["jpg"]["failed"]) == (12, 1)
    assert fields["jpg"]["kinds"] == [["JPEG", "RGB", 12]]
    assert fields["jpg"]["sizes"] == [[16, 12, 8], [640, 480, 4]]
    assert [fields["jpg"][name]["median"] for name in ("widths", "heights")] == [16, 12]
    assert fields["png"]["kinds"] == [["PNG", "I;16", 1]]
    assert fields["cls"] is None


def test_stats_counts_labels_when_short_values_repeat(shard: str) -> None:
    """Without the line ends around them; long texts have none."""
    fields = {field["field"]: field["labels"] for field in figures_of("--top", 2, shard)["fields"]}
    assert fields["cls"] == {
        "different": 4,
        "top": [["0", 4], ["1", 3]],
        "others": 2,
        "other_samples": 6,
        "least": 3,
    }
    assert fields["txt"] is None
    assert fields["jpg"] is None


def test_stats_names_what_is_odd_with_examples(shard: str) -> None:
    """Fields that some lack, empty members, images that are none, keys that do not follow each other."""
    done = run_wds("stats", shard)
    assert "jpg is missing in 1 of 14 samples: odd2" in done.text
    assert "txt is missing in 2 of 14 samples: odd1" in done.text
    assert "npy is in 1 of 14 samples: odd1" in done.text
    assert "1 sample has an empty npy (0 bytes): odd1" in done.text
    assert "1 header of jpg cannot be read: not an image of a known format: odd1" in done.text
    assert "1 shard is not sorted by key: odd1" in done.text


@pytest.mark.slow
def test_stats_finds_duplicates_and_repeated_keys_over_shards(tmp_path: Path) -> None:
    """All fields the same, or only the largest."""
    image, other = jpeg_bytes(1), jpeg_bytes(2)
    rows = [("a", image, b"1"), ("b", other, b"1"), ("c", image, b"2")], [("A", image, b"1"), ("b", image, b"1")]
    first, second = (
        write_tar(
            tmp_path / f"{number}.tar",
            [item for key, jpg, label in part for item in sample_members(key, jpg=jpg, cls=label)],
        )
        for number, part in enumerate(rows)
    )
    found = figures_of(first, second)
    same, largest = found["duplicates"]["samples"], found["duplicates"]["largest"]
    assert (same["groups"], same["samples"]) == (1, 3)
    assert [place["key"] for place in same["examples"][0]["first"]] == ["a", "A", "b"]
    assert [place["shard"] for place in same["examples"][0]["first"]] == [first, second, second]
    assert (largest["groups"], largest["samples"]) == (1, 4)
    odd = oddities_of(found)
    assert odd["repeated-key"] == (1, ["b", "b"])
    assert odd["key-case"] == (2, ["a", "A"])
    text = run_wds("stats", first, second).text
    assert "2 samples repeat all content of an earlier one: 1 group\n" in text


@pytest.mark.slow
def test_stats_is_the_same_for_every_way_to_read(tmp_path: Path, shard: str) -> None:
    """Two processes, a compressed shard, standard input, a server, and a slice that takes everything."""
    urls = write_text_shards(tmp_path, (30, 0, 7))
    one = run_wds("stats", "--json", "-", "-p", 1, *urls)
    assert one.out == run_wds("stats", "--json", "-", "-p", 2, *urls).out
    data = Path(shard).read_bytes()
    (tmp_path / "x.tar.gz").write_bytes(gzip.compress(data))
    expected = figures_of(shard)
    with serve_folder(Path(shard).parent) as root:
        others = [
            figures_of(tmp_path / "x.tar.gz"),
            figures_of(f"{root}/x.tar"),
            figures_of(stdin=data),
            figures_of("--slice", ":", shard),
        ]
    for other in others:
        assert other["fields"] == expected["fields"]
        assert other["samples"] == expected["samples"]
    assert figures_of("--slice", "28:33", *urls)["shards"] == [
        {"shard": urls[0], "samples": 2, "bytes": 62},
        {"shard": urls[2], "samples": 3, "bytes": 90},
    ]


@pytest.mark.parametrize(
    "options", [pytest.param(("-p", 2), marks=pytest.mark.slow), ("-p", 1), ("--slice", "0:")], ids=str
)
def test_stats_stops_at_damage_or_skips_it(tmp_path: Path, options: tuple[object, ...]) -> None:
    """With the samples before it, a message, and status 1."""
    good, bad = write_text_shards(tmp_path, (3, 5))
    data = Path(bad).read_bytes()
    Path(bad).write_bytes(data[: data.index(b"s1-00003.txt")])
    stopped = run_wds("stats", *options, good, bad)
    assert (stopped.status, stopped.out) == (1, b"")
    assert "wds stats: error: " in stopped.err
    assert "is cut off" in stopped.err
    done = run_wds("stats", "--json", "-", "--errors", "skip", *options, good, bad)
    found = json.loads(done.out)
    assert (done.status, found["samples"]) == (1, 5)
    assert done.err.count("wds: skipped: ") == 1
    assert oddities_of(found)["damaged-shard"] == (1, [""])


def test_stats_writes_a_file_when_asked(tmp_path: Path, shard: str) -> None:
    """And nothing to standard output; an existing file stays unless --force is given."""
    path = tmp_path / "stats.json"
    assert run_wds("stats", "--json", path, shard).out == b""
    assert json.loads(path.read_text()) == figures_of(shard)
    refused = run_wds("stats", "--json", path, "missing.tar")
    assert (refused.status, "--force" in refused.err) == (1, True)  # before anything is read
    assert run_wds("stats", "--json", path, "--force", shard).status == 0
    refused = run_wds("stats", "--json", shard)
    assert (refused.status, "--json -" in refused.err) == (2, True)


def test_stats_of_nothing_says_so(tmp_path: Path) -> None:
    """A shard without samples is odd, not an error."""
    path = write_tar(tmp_path / "x.tar", [])
    done = run_wds("stats", path)
    assert done.status == 0
    assert done.text.startswith("0 samples in 1 shard, 0 B in their fields\n")
    assert f"1 shard has no samples: {path}\n" in done.text
    assert figures_of(path)["fields"] == []


def test_stats_keeps_terminal_codes_out(tmp_path: Path) -> None:
    """Names and values come from strangers."""
    path = write_tar(tmp_path / "x.tar", [(f"{key}.f\x1b[2J", b"\t1") for key in ("k\x1b[31m", "l\u202e")])
    done = run_wds("stats", path)
    assert "\x1b" not in done.text + done.err
    assert "2 keys have characters that do not print: k\\x1b[31m" in done.text


def test_stats_counts_many_fields_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit, only their members."""
    monkeypatch.setattr("torchdata_wds.cli.stats.counting.MOST_FIELDS", 3)
    rows = [(f"k{number}.f{number % 5}", b"x" * 70) for number in range(10)]
    path = write_tar(tmp_path / "x.tar", rows)
    found = figures_of(path)
    assert Counter(field["samples"] for field in found["fields"]) == {2: 3}
    assert (found["other_fields"], found["bytes"]) == (4, 700)
    assert "and 4 members of other fields" in run_wds("stats", path).text


def test_stats_reads_tar_bytes_of_standard_input_only_once(shard: str) -> None:
    """With any number of processes."""
    done = run_wds("stats", "-p", 4, "-", stdin=tar_bytes(members()))
    assert done.text.startswith("14 samples in 1 shard, ")


def test_text_of_no_samples_has_no_table_and_examples_are_sorted(tmp_path: Path) -> None:
    """A set without fields has no empty table; examples of an oddity come in the order of their keys."""
    empty = write_tar(tmp_path / "empty.tar", [])
    lines = run_wds("stats", empty).out.decode().splitlines()
    assert lines == ["0 samples in 1 shard, 0 B in their fields", "", "odd:", f"  1 shard has no samples: {empty}"]
    rows = [
        ("a", {"jpg": b"j", "txt": b"t"}),
        ("b", {"jpg": b"j", "cls": b"1"}),
        ("c", {"jpg": b"j"}),
        ("d", {"jpg": b"j"}),
    ]
    rows += [("e", {"jpg": b"j", "txt": b"t", "cls": b"1"}), ("0", {"jpg": b"j"})]
    shard = write_tar(tmp_path / "x.tar", [member for key, fields in rows for member in sample_members(key, **fields)])
    found = {odd["text"]: [place["key"] for place in odd["examples"]] for odd in figures_of(shard)["oddities"]}
    assert all(keys == sorted(keys) for keys in found.values()), found
