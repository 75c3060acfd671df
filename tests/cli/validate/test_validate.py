"""``wds validate``: all damage of a folder in one report, and the good samples written again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.damage import DAMAGES, KEYS
from tests.kits.shards import image_samples, jpeg_bytes, sample_members, tar_bytes, text_samples, write_tar
from tests.kits.tool_kit import EXAMPLE_SAMPLES, read_samples, run_wds, write_example_folder
from torchdata_wds import index_shard


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder of damaged shards, with a good one before and behind them."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number, damage in enumerate(DAMAGES.values(), 1):
        (folder / f"x-{number:02d}.tar").write_bytes(damage.data)
    for number in (0, len(DAMAGES) + 1):
        write_tar(folder / f"x-{number:02d}.tar", sample_members(f"good{number}", txt=b"x", cls=b"1"))
    return folder


def keys(path: Path) -> list[str]:
    """The keys of an archive, by the standard library."""
    return [sample["__key__"] for sample in read_samples(path)]


# ------------------------------------------------------------------------------------------------------------- report
def test_validate_reports_every_damage_of_a_folder_in_one_run(damaged: Path) -> None:
    """A line for each with its shard and byte, then what there is of each kind; the good ones are not named."""
    done = run_wds("validate", damaged)
    assert done.status == 1
    lines = done.text.splitlines()
    for number, damage in enumerate(DAMAGES.values(), 1):
        shard = f"{damaged}/x-{number:02d}.tar"
        [line] = [line for line in lines if line.startswith(shard)]
        assert damage.says in line
        assert line.removeprefix(f"{shard}:").split(":")[0].isdecimal()
        assert ": error: " in line
    assert not any("x-00.tar" in line for line in lines)
    table = [line.split() for line in lines if not line.startswith(str(damaged))]
    assert ["shards", "good", "2"] in table
    assert ["shards", "bad", str(len(DAMAGES))] in table
    assert sum(int(row[2]) for row in table if row[0] == "error") == len(DAMAGES)
    assert ["samples", "good", str(sum(len(damage.complete) for damage in DAMAGES.values()) + 2)] in table


def test_validate_passes_good_shards(tmp_path: Path) -> None:
    """Nothing but the table, and success also where it is strict; from standard input too."""
    write_example_folder(tmp_path)
    done = run_wds("validate", "--strict", "--decode", f"{tmp_path}/train-*.tar")
    assert (done.status, done.err) == (0, "")
    table = [line.split() for line in done.text.splitlines()]
    assert ["shards", "good", "4"] in table
    assert ["samples", "good", str(EXAMPLE_SAMPLES)] in table
    assert len(table) == 4
    done = run_wds("validate", stdin=(tmp_path / "train-000000.tar").read_bytes())
    assert done.status == 0
    assert ["samples", "good", "10"] in [line.split() for line in done.text.splitlines()]


def test_validate_takes_warnings_as_errors_when_strict(tmp_path: Path) -> None:
    """Odd names are not errors, and neither are notes."""
    members = [("README", b"x"), *text_samples("s", 3), *sample_members("more", txt=b"x")]
    url = write_tar(tmp_path / "x.tar", members)
    done = run_wds("validate", url)
    assert done.status == 0
    assert f"{url}:0: warning: no-extension: " in done.text
    assert ": note: other-fields: " in done.text
    assert run_wds("validate", "--strict", url).status == 1
    url = write_tar(tmp_path / "x.tar", members[1:])
    assert run_wds("validate", "--strict", url).status == 0


def test_validate_counts_what_it_does_not_show(tmp_path: Path) -> None:
    """So many findings of a kind, and how many more there are."""
    url = write_tar(tmp_path / "x.tar", [(f"no extension {number}", b"") for number in range(30)])
    lines = run_wds("validate", url).text.splitlines()
    assert sum("belongs to no sample" in line for line in lines) == 20
    assert f"{url}: warning: no-extension: 10 more" in lines
    assert ["warning", "no-extension", "30"] in [line.split() for line in lines]
    few = run_wds("validate", "--most", "0", url).text
    assert "belongs" not in few
    assert "no-extension: 30 more" in few


def test_validate_writes_json_lines(damaged: Path, tmp_path: Path) -> None:
    """Each with its place, the summary last."""
    write_tar(tmp_path / "odd.tar", [*((f"README{number}", b"") for number in range(3)), ("a.txt", b"x")])
    done = run_wds("validate", "--json", "--most", "2", damaged, tmp_path / "odd.tar")
    *findings, summary = [json.loads(line) for line in done.text.splitlines()]
    errors = [finding for finding in findings if finding["level"] == "error"]
    assert len(errors) == len(DAMAGES)
    assert {"level", "kind", "message", "shard", "offset", "samples"} <= set(errors[0])
    assert {"level": "warning", "kind": "no-extension", "shard": f"{tmp_path}/odd.tar", "more": 1} in findings
    assert summary["level"] == "summary"
    assert summary["shards"] == {"good": 3, "bad": len(DAMAGES)}
    assert sum(summary["counts"]["error"].values()) == len(DAMAGES)


def test_validate_decodes_when_asked_to(tmp_path: Path) -> None:
    """Each field that does not decode is named; pickles are left alone."""
    members = [
        *image_samples("s", 2),
        *sample_members("t", jpg=jpeg_bytes(1)[:200], json=b"{", cls=b"1"),
        *sample_members("u", jpg=jpeg_bytes(1), json=b"1", cls=b"1", pyd=b"cos\nsystem\n(S'exit 1'\ntR."),
    ]
    url = write_tar(tmp_path / "x.tar", members)
    assert run_wds("validate", url).status == 0
    done = run_wds("validate", "--decode", url)
    assert done.status == 1
    assert done.text.count(": error: undecodable: ") == 2
    assert done.text.count(": note: not-decoded: ") == 1


def test_validate_shows_names_of_strangers_as_they_are_safe(tmp_path: Path) -> None:
    """Nothing in a name acts on a terminal, and each finding has one line."""
    line = run_wds("validate", write_tar(tmp_path / "x.tar", [("\x1b[2Jfoo\nbar", b"x")])).text.splitlines()[0]
    assert r"\x1b[2Jfoo\nbar" in line


def test_validate_masks_secrets(tmp_path: Path) -> None:
    """In the report, too."""
    done = run_wds("validate", "pipe:false --token=geheim", f"pipe:cat {tmp_path}/no.tar --password geheim")
    assert done.status == 1
    assert done.text.count("error: unreadable") == 2
    assert "geheim" not in done.text + done.err


def test_validate_reports_the_same_on_several_processes(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the shards."""
    monkeypatch.setattr("torchdata_wds.cli.jobs.threading.active_count", lambda: 1)  # beside threads, they are spawned
    assert run_wds("validate", "--decode", "-p", "2", damaged).text == run_wds("validate", "--decode", damaged).text


# ------------------------------------------------------------------------------------------------------------- repair
def test_fix_writes_the_good_samples_of_all_shards_to_one_archive(damaged: Path, tmp_path: Path) -> None:
    """With new keys, as many shards have the same ones; what is written is good."""
    out = tmp_path / "out.tar.gz"
    done = run_wds("validate", damaged, "--fix", out, "--rekey", "{shard}/{key}")
    assert done.status == 1
    expected = [f"x-{number:02d}/{key}" for number, damage in enumerate(DAMAGES.values(), 1) for key in damage.complete]
    assert keys(out) == ["x-00/good0", *expected, f"x-{len(DAMAGES) + 1:02d}/good{len(DAMAGES) + 1}"]
    assert f"wrote {len(expected) + 2} good samples to {out}" in done.err
    assert out.read_bytes().startswith(b"\x1f\x8b")
    assert run_wds("validate", "--strict", out).status == 0


def test_fix_tells_each_sample_whose_key_is_taken(damaged: Path, tmp_path: Path) -> None:
    """Nothing is lost without a word."""
    out = tmp_path / "out.tar"
    done = run_wds("validate", damaged, "--fix", out)
    assert keys(out) == ["good0", *KEYS, f"good{len(DAMAGES) + 1}"]
    lost = sum(len(damage.complete) for damage in DAMAGES.values()) - 3
    assert done.text.count(": error: not-written: ") == lost
    assert "--rekey" in done.text
    assert ["error", "not-written", str(lost)] in [line.split() for line in done.text.splitlines()]
    assert f"lost: {lost}" in done.err


def test_fix_writes_an_archive_for_each_shard_to_a_folder(damaged: Path, tmp_path: Path) -> None:
    """Under the same names; none for a shard without a good sample."""
    done = run_wds("validate", damaged, "--fix", f"{tmp_path}/out/")
    expected = {f"x-{number:02d}.tar": damage.complete for number, damage in enumerate(DAMAGES.values(), 1)}
    expected |= {f"x-{number:02d}.tar": [f"good{number}"] for number in (0, len(DAMAGES) + 1)}
    written = {path.name: keys(path) for path in (tmp_path / "out").iterdir()}
    assert written == {name: found for name, found in expected.items() if found}
    assert done.err.count("no good sample") == sum(not found for found in expected.values())
    assert run_wds("validate", "--strict", tmp_path / "out").status == 0


def test_fix_repairs_in_place_when_forced(tmp_path: Path) -> None:
    """The shard is replaced when it is read to its end, and so is what was its index."""
    path = tmp_path / "x.tar"
    write_tar(path, [*text_samples("s", 40), ("README", b"x")])
    index_shard(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-11_000])
    done = run_wds("validate", path, "--fix", f"{tmp_path}/")
    assert "already exists" in done.err
    assert done.out == b""
    assert path.read_bytes() == whole[:-11_000]
    assert run_wds("validate", path, "--fix", f"{tmp_path}/", "--force").status == 1
    assert run_wds("validate", "--strict", path).status == 0
    assert 30 < len(keys(path)) < 40
    assert [entry.name for entry in tmp_path.rglob("*") if entry.is_file()] == ["x.tar"]


def test_fix_leaves_out_what_validation_finds(tmp_path: Path) -> None:
    """Duplicates, what does not decode, odd members and keys that cannot be written; apart members are joined."""
    members = [
        *sample_members("a", cls=b"1"),
        *sample_members("b", cls=b"x"),
        *sample_members("c", cls=b"1", CLS=b"2"),
        ("README", b"x"),
        *sample_members("/d", cls=b"1"),
        *sample_members("a", txt=b"joined"),
    ]
    url = write_tar(tmp_path / "x.tar", members)
    done = run_wds("validate", "--decode", url, "--fix", tmp_path / "out.tar")
    assert done.status == 1
    assert read_samples(tmp_path / "out.tar") == [{"__key__": "a", "cls": b"1", "txt": b"joined"}]
    for kind in ("error: undecodable", "error: duplicate-field", "error: not-written", "note: joined"):
        assert done.text.count(f": {kind}: ") == 1
    assert run_wds("validate", "--strict", "--decode", tmp_path / "out.tar").status == 0


def test_fix_copies_good_shards_and_succeeds(tmp_path: Path) -> None:
    """Also those with fields in capitals, where the case is kept."""
    url = write_tar(tmp_path / "x.tar", [("a.TXT", b"1"), ("b.TXT", b"2")])
    assert run_wds("validate", url, "--keep-case", "--fix", tmp_path / "out.tar").status == 0
    assert read_samples(tmp_path / "out.tar") == read_samples(url)
    bad = tmp_path / "bad.tar"
    bad.write_bytes(tar_bytes(text_samples("s", 1))[:700])
    done = run_wds("validate", bad, "--fix", tmp_path / "none.tar")
    assert done.status == 1
    assert "none.tar is not written" in done.err
    assert not any("none" in name for name in os.listdir(tmp_path))  # noqa: PTH208


@pytest.mark.slow
def test_fix_writes_on_when_nobody_reads_the_report(tmp_path: Path) -> None:
    """What was asked for is done, and the status is its own."""
    url = write_tar(tmp_path / "x.tar", [*text_samples("s", 2), *((f"README{number}", b"x") for number in range(9))])
    program = (sys.executable, "-m", "torchdata_wds")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [*program, "validate", "--strict", url, "--fix", tmp_path / "out.tar"],
            stdout=writing,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr.decode().count("\n")) == (1, 1)
    assert len(keys(tmp_path / "out.tar")) == 2


def test_fix_starts_a_command_once(tmp_path: Path) -> None:
    """It gets the whole archive, and no empty one before."""
    url = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    command = f"pipe:echo >> {tmp_path}/starts; cat > {tmp_path}/out.tar"
    assert run_wds("validate", url, "--fix", command).status == 0
    assert (tmp_path / "starts").read_text() == "\n"
    assert len(keys(tmp_path / "out.tar")) == 2


def test_fix_tells_fields_that_it_does_not_write(tmp_path: Path) -> None:
    """Those of the form __x__ are metadata to writers."""
    url = write_tar(tmp_path / "x.tar", [("a.txt", b"1"), ("a.__note__", b"2")])
    done = run_wds("validate", url, "--fix", tmp_path / "out.tar")
    assert read_samples(tmp_path / "out.tar") == [{"__key__": "a", "txt": b"1"}]
    assert f"{url}:1024: warning: metadata-field: " in done.text


def test_fix_writes_to_stores(tmp_path: Path) -> None:
    """A folder of a store is no folder of this machine."""
    url = write_tar(tmp_path / "x.tar", text_samples("s", 2))
    assert run_wds("validate", url, "--fix", "memory://fixed/").status == 0
    assert run_wds("validate", "--strict", "memory://fixed/x.tar").status == 0
    assert "exists" in run_wds("validate", url, "--fix", "memory://fixed/").err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-", "--fix", "out.tar"], "only once"),
        (["pipe:cat x.tar", "--fix", "out.tar"], "only once"),
        (["x.tar", "--fix", "-"], "needs a file"),
        (["x.tar", "--fix", ""], "needs a file"),
        (["a/x.tar", "b/x.tar", "--fix", "out/"], "a/x.tar and b/x.tar would both become out/x.tar"),
        (["a/x.tar", "b/y.tar", "--fix", "{key}.tar"], "unknown place {key}: there are {name}"),
        (["x.tar", "--force"], "--fix"),
        (["x.tar", "--rekey", "#"], "--fix"),
        (["x.tar", "--most", "-1"], "--most"),
        (["x.tar", "--errors", "skip"], "--errors"),
    ],
)
def test_validate_refuses_wrong_arguments(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read or written."""
    monkeypatch.chdir(tmp_path)
    done = run_wds("validate", *arguments)
    assert done.status == 2
    assert says in done.err
    assert list(tmp_path.iterdir()) == []
