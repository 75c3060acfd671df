"""The demo command: right on good shards, plain about bad ones."""

import bz2
import io
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.kits.shards import image_samples, sample_members, tar_bytes, text_keys, write_tar, write_text_shards
from torchdata_wds.cli import demo, main
from torchdata_wds.cli.demo import SIZES, epoch, scan, write_shards

VERDICT = "every sample came exactly once\n"


def run(*arguments: str | Path) -> int:
    """Runs the demo in this process."""
    return main.main(["demo", *map(str, arguments)])


# ------------------------------------------------------------------------------------------------------ good shards
@pytest.mark.slow
def test_demo_reports_every_sample_once_when_run_as_a_user_does() -> None:
    """The whole command: exit status 0, figures on stdout, no banner and no progress on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "torchdata_wds", "demo"], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = dict(line.rsplit(maxsplit=1) for line in done.stdout.replace(" s\n", "\n").splitlines()[:-1])
    assert figures["samples"] == str(sum(SIZES))
    assert figures["shards"] == str(len(SIZES))
    assert figures["workers"] == "2"
    assert all(float(figures[name].replace(",", "")) > 0 for name in ("samples/s", "MB/s", "time to first batch"))
    assert done.stdout.endswith(VERDICT)
    writing, scanned = done.stderr.splitlines()
    assert scanned == f"wds: scanned {len(SIZES)} shards"
    folder = Path(writing.rpartition(" ")[2])
    assert folder.is_absolute()
    assert not folder.exists()


@pytest.fixture
def _few_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's own shards, but two and small."""
    monkeypatch.setattr(demo, "SIZES", (3, 2))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_demo_runs_without_torchdata(
    workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it has no wheels, the demo is the same."""
    urls = [write_tar(tmp_path / f"{number}.tar", image_samples(f"s{number}-", 40 * number)) for number in range(4)]
    monkeypatch.setitem(sys.modules, "torchdata_wds.workers.service", None)
    assert run("--workers", workers, "--shards", *urls) == 0
    captured = capsys.readouterr()
    assert "samples              240\n" in captured.out
    assert captured.out.endswith(VERDICT)


@pytest.mark.usefixtures("_few_shards")
@pytest.mark.parametrize(
    ("name", "expected"), [("trial", "trial-"), ("new/", "new/train-"), ("there", "there/train-"), ("a/b", "a/b-")]
)
def test_demo_keeps_its_shards_when_asked(
    name: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a name, or in a folder that exists or is made; nothing else is left, and other commands read them."""
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert run("--workers", 0, "--keep", name) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith(VERDICT)
    assert captured.err.startswith(f"wds: wrote 2 shards: {expected}{{000000..000001}}.tar\n")
    assert sorted(str(path) for path in Path().rglob("*") if path.is_file()) == [
        f"{expected}000000.tar",
        f"{expected}000001.tar",
    ]
    assert main.main(["validate", "--strict", "--decode", f"{expected}{{000000..000001}}.tar"]) == 0


@pytest.mark.usefixtures("_few_shards")
def test_demo_replaces_shards_only_when_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one of them; what was there stays as it was."""
    monkeypatch.chdir(tmp_path)
    mine = Path("train-000001.tar")
    mine.write_text("mine")
    assert run("--workers", 0, "--keep", "train") == 1
    assert "train-000001.tar already exists" in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("train-000001.tar", "mine")]
    assert run("--workers", 0, "--keep", "train", "--force") == 0
    assert mine.stat().st_size > 1000


def test_demo_refuses_arguments_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is written."""
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ["--keep", "s3://bucket/train"],
        ["--keep", ""],
        ["--keep", "train-{000..007}"],
        ["--keep", "train", "--shards", "x.tar"],
        ["--force"],
    ):
        assert run(*arguments) == 2
        assert "--keep" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_shards_hold_images_labels_and_json(tmp_path: Path) -> None:
    """They are what a user has: uneven shards whose fields belong together."""
    assert write_shards(tmp_path).endswith("/train-{000000..000007}.tar")
    urls = sorted(map(str, tmp_path.iterdir()))
    samples, fields, _ = scan(urls)
    assert [sum(url == place for place, _ in samples) for url in urls] == list(SIZES)
    assert set(samples.values()) == {1}
    assert fields == dict.fromkeys(("cls", "jpg", "json"), sum(SIZES))
    assert len(set(SIZES)) > 1


@pytest.mark.parametrize("name", ["x.tar.bz2", "pipe"])
def test_demo_reads_shards_that_are_no_plain_files(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is scanned and what is read agree also through compression and commands."""
    path = tmp_path / "x.tar.bz2"
    path.write_bytes(bz2.compress(tar_bytes(image_samples("s", 4))))
    assert run("--workers", 0, "--shards", f"pipe:cat {path}" if name == "pipe" else path) == 0
    assert capsys.readouterr().out.endswith(VERDICT)


def test_demo_reads_samples_that_have_different_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A sample without the image or label that others have is a sample."""
    members = [*image_samples("a", 3), ("b.txt", b"text"), ("c.seg.png", _png()), ("README", b"no sample")]
    assert run("--workers", 0, "--shards", write_tar(tmp_path / "x.tar", members)) == 0
    assert "samples              5\n" in capsys.readouterr().out


def _png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (3, 2)).save(out, "PNG")
    return out.getvalue()


def test_demo_counts_keys_by_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same key in two shards, and the same shard listed twice, are different samples."""
    urls = [write_tar(tmp_path / name, sample_members("same", txt=b"1")) for name in ("a.tar", "b.tar")]
    assert run("--workers", 0, "--shards", *urls, urls[0]) == 0
    assert "samples              3\n" in capsys.readouterr().out


def test_augment_gives_images_of_one_size_and_keeps_none() -> None:
    """Batches can be stacked."""
    random.seed(0)
    for size in ((3, 5), (300, 20)):
        tensor = epoch.augment(Image.new("RGB", size, (255, 0, 0)))
        assert tensor is not None
        assert tensor.shape == (3, 96, 96)
        assert tensor.dtype == torch.float32
        assert tensor[0].min() == 1.0
        assert tensor[1].max() == 0.0
    assert epoch.augment(None) is None


# ------------------------------------------------------------------------------------------------- lost and doubled
@pytest.mark.parametrize(
    ("read", "said"),
    [
        ([1], "2 of 9 samples lost:\n  s0-00000 of {url}\n  s0-00001 of {url}\n"),
        ([0], "7 of 9 samples lost:\n  s1-00000 of {other}\n"),
        ([0, 1, 0], "2 of 9 samples doubled:\n  s0-00000 of {url}\n  s0-00001 of {url}\n"),
    ],
)
def test_demo_fails_and_names_samples_when_some_are_lost_or_doubled(
    read: list[int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that forgets a shard, or reads one twice, is found out; five samples are named."""
    urls = write_text_shards(tmp_path, (2, 7))
    build = epoch.build_pipe
    monkeypatch.setattr(epoch, "build_pipe", lambda _, fields: build([urls[number] for number in read], fields))
    assert run("--workers", 0, "--shards", *urls) == 1
    output = capsys.readouterr().out
    assert said.format(url=urls[0], other=urls[1]) in output
    assert output.endswith("  and 2 more\n") is (read == [0])


def test_demo_counts_a_sample_as_lost_when_it_does_not_decode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged, the rest is read."""
    members = [*image_samples("s", 3), ("t.jpg", b"no image")]
    assert run("--workers", 0, "--shards", write_tar(tmp_path / "x.tar", members)) == 1
    assert "1 of 4 samples lost:\n  t of " in capsys.readouterr().out
    assert "does not decode as an image" in caplog.text


# ---------------------------------------------------------------------------------------------------------- errors
def damaged(folder: Path, kind: str) -> str:
    """A pattern that cannot be read."""
    whole = tar_bytes(image_samples("s", 3))
    path = folder / f"{kind}.tar"
    if kind == "cut":
        path.write_bytes(whole[:1000])
    elif kind == "text":
        path.write_bytes(b"this is no tar" * 100)
    elif kind == "empty":
        path.write_bytes(tar_bytes([]))
    elif kind == "unsorted":
        write_tar(path, [("a.txt", b""), ("b.txt", b""), ("a.cls", b"1")])
    elif kind == "stdin":
        return "-"
    elif kind == "command":
        return "pipe:exit 3"
    elif kind == "pattern":
        return str(folder / "nothing-*.tar")
    return str(path)


def test_demo_says_what_is_wrong_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr and exit status 1."""
    for kind, message in (
        ("missing", "does not exist"),
        ("pattern", "no shard matches"),
        ("cut", "cut off"),
        ("text", "this is no tar"),
        ("empty", "no samples in 1 shard:"),
        ("unsorted", "comes back at member a.cls"),
        ("stdin", "can be read only once"),
        ("command", "exit status 3"),
    ):
        assert run("--workers", 0, "--shards", damaged(tmp_path, kind)) == 1
        captured = capsys.readouterr()
        error = captured.err.splitlines()[-1]
        assert error.startswith("wds demo: error: ")
        assert message in error
        assert "This exception is thrown by" not in captured.err
        assert captured.out == ""


def test_demo_masks_secrets_when_it_names_samples(capsys: pytest.CaptureFixture[str]) -> None:
    """A signed URL is shown without its signature."""
    url = "https://host/x.tar?X-Amz-Signature=abcdef"
    assert demo.report(Counter({(url, "a"): 1}), Counter()) == 1
    assert "abcdef" not in capsys.readouterr().out


def heed_interrupts() -> None:
    """Undoes what a shell does to the programs that it starts in the background: they would not see Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.slow
def test_demo_is_quiet_when_interrupted_while_its_workers_read(tmp_path: Path) -> None:
    """The signal reaches the main process and its workers, as from a terminal; none of them shows a traceback."""
    pattern = write_shards(tmp_path)
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "torchdata_wds", "demo", "--shards", *[pattern] * 5],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=heed_interrupts,
        text=True,
    )
    assert process.stdout is not None
    assert "scanned" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in output


# ------------------------------------------------------------------------------------------------------------- scan
def test_scan_finds_what_was_written(tmp_path: Path) -> None:
    """Samples, fields and bytes, with members that belong to no sample left out."""
    sizes = (3, 0, 4)
    odd = [("d.v1/a.JPG", b"12345"), (".hidden", b"x"), ("README", b"x"), ("__index__/x.json", b"x")]
    samples, fields, size = scan([*write_text_shards(tmp_path, sizes), write_tar(tmp_path / "odd.tar", odd)])
    assert samples.total() == 8
    assert sorted(key for _, key in samples) == sorted([*text_keys(sizes), "d.v1/a"])
    assert fields == {"txt": 7, "json": 7, "cls": 7, "jpg": 1}
    texts = [len(f"text of {key}") + len(json.dumps({"number": int(key[-5:])})) + 1 for key in text_keys(sizes)]
    assert size == sum(texts) + 5
