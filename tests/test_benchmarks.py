"""The benchmarks run: with few samples, beside whichever of the libraries they compare with."""

import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TEXT = ("text", "text, pax", "text.tar.gz", "text.tar.zst")
LOADERS = ("ours: WdsLoader", "ours: service", "DataLoader")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the shards are made, once for all scripts."""
    return tmp_path_factory.mktemp("bench")


def run(script: str, shards: Path, tmp_path: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Runs a script with few samples from elsewhere; returns what it printed and the JSON it wrote."""
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.png"
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--rounds", "1", *arguments]
    command += ["--folder", str(shards), "--json", str(figures), "--chart", str(chart)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("matplotlib"):
        assert chart.read_bytes().startswith(b"\x89PNG")
    else:
        assert "no chart: matplotlib is not installed" in done.stderr
    return done.stdout, json.loads(figures.read_text())


def rows(content: dict[str, Any]) -> set[tuple[str, str]]:
    """Kind and contender of each row, of all tables."""
    return {(row["kind"], row["contender"]) for table in content["tables"] for row in table["rows"]}


def check_table(printed: str, content: dict[str, Any]) -> None:
    """Each row of the JSON is one of the printed ones, and what was left out is named."""
    cells = {tuple(cell.strip() for cell in line.split("|")[1:3]) for line in printed.splitlines() if "|" in line}
    assert rows(content) <= cells
    assert all(f"left out: {name}" in printed for name in content["left_out"])
    assert content["machine"]["Python"] == sys.version.split()[0]
    assert content["quick"] is True


def test_read_compares_every_kind_of_shards(shards: Path, tmp_path: Path) -> None:
    """Ours, webdataset and torchdata read each kind, next to the limit; litdata where it is installed."""
    printed, content = run("read.py", shards, tmp_path)
    check_table(printed, content)
    for kind in (*TEXT, "images", "big"):
        names = {contender for row_kind, contender in rows(content) if row_kind == kind}
        assert {"ours", "webdataset", "torchdata"} <= names
        assert sum(name.startswith(("raw read", "gunzip", "zstandard")) for name in names) == 1
        assert ("litdata" in names) is ("litdata" not in content["left_out"])


def test_decode_compares_each_decoder_and_the_overhead(shards: Path, tmp_path: Path) -> None:
    """Pillow is measured as if simplejpeg were not there, and simplejpeg where it is; DALI is left out if missing."""
    printed, content = run("decode.py", shards, tmp_path, "--dali")
    check_table(printed, content)
    for name in ("pillow", *(["simplejpeg"] if importlib.util.find_spec("simplejpeg") else [])):
        expected = {("from memory", "ours"), ("from memory", "bare loop"), ("from shards", "ours")}
        expected |= {("from shards", "reading + bare loop"), ("from shards", "webdataset")}
        assert {(f"{name}, {how}", contender) for how, contender in expected} <= rows(content)
    assert {("txt, json, cls", name) for name in ("ours", "bare loop", "webdataset")} <= rows(content)
    for size in ("400x400", "500x375", "1000x750"):
        assert {(f"random crops of {size}", name) for name in ("crop_decoder", "pilrgb, crop, resize")} <= rows(content)
        assert {(f"middles of {size}", name) for name in ("center_crop_decoder", "pilrgb, resize")} <= rows(content)
        assert {(f"{form} of {size}", name) for form in ("PNG", "WEBP") for name in ("ours", "Pillow")} <= rows(content)
        assert {(size, name) for name in ("max_size=224", "whole")} <= rows(content)
    assert ("DALI" in content["left_out"]) is not any("DALI" in contender for _, contender in rows(content))


def test_workers_compares_one_and_two_workers_and_steps(shards: Path, tmp_path: Path) -> None:
    """All loaders run each graph, per item and batched, with one worker and with two; then come single steps."""
    printed, content = run("workers.py", shards, tmp_path)
    check_table(printed, content)
    kinds = {kind for kind, _ in rows(content)}
    steps = {kind for kind in kinds if kind.startswith("10 MB")}
    graphs = kinds - steps
    names = [f"{loader}, {workers}" for loader in LOADERS for workers in ("1 worker", "2 workers")]
    assert rows(content) == {(kind, name) for kind in graphs for name in names} | {
        (kind, name) for kind in steps for name in LOADERS
    }
    assert {kind.partition(",")[0] for kind in graphs} == {"small tensors", "text", "images to rgb8"}
    assert sum("per item" in kind for kind in graphs) == 2
    assert len(steps) == 2


def test_memory_compares_a_large_shard_with_a_small_one(shards: Path, tmp_path: Path) -> None:
    """Both peaks of each source are there, and the difference is small: remotely, a block that is read ahead."""
    printed, content = run("memory.py", shards, tmp_path)
    check_table(printed, content)
    found = content["tables"][0]["rows"]
    for kind in ("local file", "HTTP", *(["S3"] if "S3" not in content["left_out"] else [])):
        small, large = (row for row in found if row["kind"] == kind)
        assert (small["samples"], large["samples"]) == (333, 10_000)
        assert large["above_first"] < (96 if kind == "S3" else 32)


def test_startup_measures_imports_and_first_samples(shards: Path, tmp_path: Path) -> None:
    """The package and webdataset are imported, and both give a first sample."""
    printed, content = run("startup.py", shards, tmp_path)
    check_table(printed, content)
    measured = {(kind.partition(" of ")[0], contender) for kind, contender in rows(content)}
    assert {
        (kind, name) for kind in ("import after torch", "first sample") for name in ("ours", "webdataset")
    } <= measured


def test_scale_compares_many_shards_with_few(shards: Path, tmp_path: Path) -> None:
    """Listing, starts, states and memory, with and without workers, beside webdataset where it has the same case."""
    printed, content = run("scale.py", shards, tmp_path, "--case", "braces", "--case", "split, index")
    check_table(printed, content)
    listing, starts, states, memory = (table["rows"] for table in content["tables"])
    assert {row["contender"] for row in listing} == {"ours", "webdataset"}
    ours = {"ours: WdsLoader", "ours: StatefulDataLoader"}
    for count in (10, 100):
        for workers in (0, 2):
            for case, others in (("braces", {"webdataset"}), ("split, index", set())):
                kind = f"{case}, {count} shards, {workers} workers"
                assert {row["contender"] for row in starts if row["kind"] == kind} == ours | others
                assert {row["contender"] for row in states if row["kind"] == kind} == ours
    assert {row["kind"].rpartition(", ")[2] for row in memory} == {"2 workers"}
    assert all(0 < row["size"] < 20_000 for row in states)


def test_no_script_is_left_out() -> None:
    """Every script that has a main function is run here, or makes the shards."""
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()}
    # Others run them, or other tests do.
    others = {"shards", "http", "serving", "order_large", "order_picture", "fleet", "train_child"}
    alone = {"read", "decode", "write", "workers", "memory", "startup", "resume", "tools", "order", "ray_pool"}
    alone |= {"stats", "train", "scale"}
    assert scripts == alone | others


def test_resume_compares_skipping_with_making_again(shards: Path, tmp_path: Path) -> None:
    """Each chain goes on with and without indexes, and with all items made again."""
    printed, content = run("resume.py", shards, tmp_path)
    check_table(printed, content)
    kinds = {kind for kind, _ in rows(content)}
    assert kinds == {"in order", "shuffled", "shuffled, 2 workers"}
    assert rows(content) == {
        (kind, name) for kind in kinds for name in ("ours, with indexes", "ours, without", "made again")
    }


def test_write_compares_with_webdataset(shards: Path, tmp_path: Path) -> None:
    """Ours, webdataset and tarfile write each kind, next to the limit; nothing is left behind."""
    printed, content = run("write.py", shards, tmp_path)
    check_table(printed, content)
    for kind in ("text", "images"):
        assert {contender for row_kind, contender in rows(content) if row_kind == kind} == {
            "ours",
            "ours, ShardWriter",
            "tarfile",
            "webdataset",
            "webdataset, mtime=0",
            "plain write",
        }
    assert not [path for path in shards.iterdir() if path.name.startswith("tmp")]


def test_tools_compares_the_commands(shards: Path, tmp_path: Path) -> None:
    """Each command beside its rivals, `wds sort` with little and much memory; nothing stays behind."""
    kinds = ("copying text", "creating text", "checking text", "sorting images", "showing images")
    printed, content = run("tools.py", shards, tmp_path, *(word for kind in kinds for word in ("--kind", kind)))
    check_table(printed, content)
    found = {kind: {contender for row_kind, contender in rows(content) if row_kind == kind} for kind in kinds}
    assert found["copying text"] == {"ours, wds cat", "ours, loading all samples", "webdataset", "cp, sync"}
    assert found["creating text"] == {"ours, wds create", "GNU tar, sync"}
    assert found["checking text"] == {"ours, loading all samples", "ours, wds validate", "ours, index_shard"}
    assert {"ours, wds cat", "ours, wds sort, in memory"} < found["sorting images"]
    assert len(found["sorting images"]) == 3
    assert len(found["showing images"]) == 2
    assert not [path for path in shards.iterdir() if path.name.startswith("tmp")]


def test_picture_of_the_orders_is_drawn_as_in_the_manual(tmp_path: Path) -> None:
    """The script writes a picture of few samples; that of the manual is of the same size, and small."""
    script, out = BENCHMARKS / "order_picture.py", tmp_path / "order.png"
    subprocess.run([sys.executable, str(script), "--quick", "--out", str(out)], cwd=tmp_path, check=True)
    kept = BENCHMARKS.parent / "torchdata_wds" / "docs" / "order.png"
    assert kept.stat().st_size < 60_000
    with Image.open(out) as drawn, Image.open(kept) as shown:
        assert drawn.size == shown.size
        assert drawn.getcolors() != shown.getcolors()


def test_order_compares_with_reading_front_to_back_and_with_random_access(shards: Path, tmp_path: Path) -> None:
    """Runs of each length, locally and from a server; samples by number; and few samples beside many."""
    printed, content = run("order.py", shards, tmp_path)
    check_table(printed, content)
    found: dict[str, set[str]] = {}
    for kind, contender in rows(content):
        found.setdefault(kind.partition(",")[0], set()).add(contender)
    lengths = {f"run={length}" for length in (1, 4, 16, 64)}
    assert found["HTTP"] == lengths | {"front to back"}
    assert found["local"] == found["HTTP"] | {"limit, run=1", "limit, run=16"}
    for kind in ("4 shards", "24 shards"):
        assert {"IndexedShards", "IndexedShards, 32 at once", "tarfile, all open"} <= found[kind]
        for name in ("litdata", "wids"):
            assert (name in found[kind]) is (name not in content["left_out"])
    for kind in ("start", "resume", "a worker's private memory", "a worker's resident memory"):
        assert found[kind] == {"500 samples", "5,000 samples"}


def test_train_compares_with_those_that_run_here(shards: Path, tmp_path: Path) -> None:
    """Our loops and some others make batches with two workers; who cannot is named, and leaves no row."""
    ours, others = {"ours", "ours, pilrgb", "ours in DataLoader"}, {"webdataset, PIL", "torchdata, PIL", "DALI"}
    only = [word for name in sorted(ours | others) for word in ("--only", name)]
    printed, content = run("train.py", shards, tmp_path, "--size", "400x400", "--workers", "2", *only)
    check_table(printed, content)
    names = {name for _, name in rows(content)}
    assert ours | {"webdataset, PIL"} <= names == (ours | others) - set(content["left_out"])
    for row in content["tables"][0]["rows"]:
        assert row["kind"] == "400x400, 2 workers"
        assert 0 < row["main"] < 1e6
        assert 0 < row["first"] < 600
        assert row["megabytes"] > 50


def test_stats_compares_figures_on_and_off(shards: Path, tmp_path: Path) -> None:
    """With and without workers."""
    printed, content = run("stats.py", shards, tmp_path, "--kind", "images to rgb8, batches of 4, 2 workers")
    check_table(printed, content)
    assert rows(content) == {("images to rgb8, batches of 4, 2 workers", name) for name in ("on", "off", "off again")}


def test_ray_pool_compares_actors_with_processes(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graphs in actors and in both loaders' processes; what a worker costs; and steps from two nodes."""
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the paths of Ray's sockets in it must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        printed, content = run("ray_pool.py", shards, tmp_path, "--kind", "images to")
    check_table(printed, content)
    speed, costs, steps = (table["rows"] for table in content["tables"])
    assert {row["kind"] for row in speed} == {"images to rgb8, batches of 4"}
    assert [row["contender"] for row in speed] == ["ours: RayPool", "ours: WdsLoader", "ours: service"]
    assert all(row["cpu"] >= 0 for row in speed)
    assert [row["contender"] for row in costs] == ["ours: WdsLoader", "ours: RayPool"]
    assert all(row["private"] > 0 and row["resident"] > 0 for row in costs)
    assert [row["contender"] for row in steps] == ["ours: WdsLoader", "ours: RayPool", "ours: RayPool, other node"]
