"""What validation has found is left out, and nothing else."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kits.damage import DAMAGES
from tests.kits.shards import sample_members, text_samples, write_tar
from torchdata_wds.cli.validate import Results, repaired_samples
from torchdata_wds.cli.validate.findings import Finding, ValidationRules
from torchdata_wds.cli.validate.shard_validation import report_shard
from torchdata_wds.errors import DecodingError, ShardFormatError


def repaired(url: str, rules: ValidationRules = ValidationRules()) -> tuple[list[dict[str, Any]], list[Finding]]:  # noqa: B008
    """The samples that are written, and what is told."""
    items = list(repaired_samples(url, report_shard(url, rules, 20).plan, rules))
    told = [item for item in items if isinstance(item, Finding)]
    samples = [item for item in items if not isinstance(item, Finding)]
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples], told


def members(order: Sequence[str]) -> list[tuple[str, bytes]]:
    """Members by their names, their content as well."""
    return [(name, name.encode()) for name in order]


@pytest.mark.parametrize("name", DAMAGES)
def test_repair_gives_the_complete_samples_of_each_damaged_shard(name: str, tmp_path: Path) -> None:
    """Those before the damage."""
    path = tmp_path / "x.tar"
    path.write_bytes(DAMAGES[name].data)
    samples, told = repaired(str(path))
    assert [sample["__key__"] for sample in samples] == DAMAGES[name].complete
    assert told == []


def test_repair_joins_members_that_are_apart(tmp_path: Path) -> None:
    """A sample comes where its last member is, and that is told for each part that was joined."""
    url = write_tar(tmp_path / "x.tar", members(["a.cls", "b.cls", "c.txt", "a.txt", "b.txt", "d.txt", "a.jpg"]))
    samples, told = repaired(url)
    assert samples == [
        {"__key__": "c", "txt": b"c.txt"},
        {"__key__": "b", "cls": b"b.cls", "txt": b"b.txt"},
        {"__key__": "d", "txt": b"d.txt"},
        {"__key__": "a", "cls": b"a.cls", "txt": b"a.txt", "jpg": b"a.jpg"},
    ]
    assert [(finding.kind, finding.key, finding.offset) for finding in told] == [
        ("joined", "a", 3072),
        ("joined", "b", 4096),
        ("joined", "a", 6144),
    ]


def test_repair_keeps_the_first_of_samples_that_disagree(tmp_path: Path) -> None:
    """The same again is no other sample; another content is, and is told."""
    same = sample_members("a", cls=b"1", txt=b"one")
    other = sample_members("a", cls=b"1", txt=b"two")
    url = write_tar(tmp_path / "x.tar", [*same, *members(["b.txt"]), *other, *members(["c.txt"]), *same])
    samples, told = repaired(url)
    assert [(sample["__key__"], sample["txt"]) for sample in samples] == [
        ("b", b"b.txt"),
        ("c", b"c.txt"),
        ("a", b"one"),
    ]
    assert [(finding.kind, finding.offset) for finding in told] == [("left-out", 3072), ("joined", 6144)]
    assert "content for txt" in told[0].message


@pytest.mark.parametrize(
    ("order", "kept", "left_out"),
    [
        (["a.cls", "b.txt", "a.txt", "a.TXT", "c.txt"], ["b", "c"], 2),
        (["a.cls", "b.txt", "a.txt", "c.txt", "a.jpg", "cut"], ["b", "c"], 2),
        (["a.cls", "b.txt", "a.txt", "cut"], ["b"], 1),
    ],
    ids=["bad", "cut", "cut at its second run"],
)
def test_repair_leaves_out_whole_samples_whose_other_members_are_bad(
    order: list[str], kept: list[str], left_out: int, tmp_path: Path
) -> None:
    """No half sample is written."""
    path = tmp_path / "x.tar"
    write_tar(path, members([name for name in order if name != "cut"]))
    if "cut" in order:
        path.write_bytes(path.read_bytes()[:-1200])
    samples, told = repaired(str(path))
    assert [sample["__key__"] for sample in samples] == kept
    assert [finding.kind for finding in told] == ["left-out"] * left_out


def test_repair_takes_each_run_as_a_sample_when_told_to(tmp_path: Path) -> None:
    """As grouping does with the same option, also where another sample of that key is bad."""
    url = write_tar(tmp_path / "x.tar", members(["a.txt", "b.txt", "a.cls", "a.CLS", "c.txt", "a.jpg"]))
    samples, told = repaired(url, ValidationRules(on_reappearing="allow"))
    assert [sample["__key__"] for sample in samples] == ["a", "b", "c", "a"]
    assert told == []


def test_repair_leaves_out_what_does_not_decode(tmp_path: Path) -> None:
    """And does not decode anything again."""
    asked = []

    def check(sample: Any) -> Any:
        asked.append(sample["__key__"])
        if sample["__key__"].endswith("1"):
            yield DecodingError("wrong", field="txt")

    url = write_tar(tmp_path / "x.tar", text_samples("s", 3))
    samples, _ = repaired(url, ValidationRules(check_fields=check))
    assert [sample["__key__"] for sample in samples] == ["s00000", "s00002"]
    assert len(asked) == 3


@pytest.mark.parametrize("change", ["cut", "gone", "other", "fewer runs"])
def test_repair_raises_when_the_shard_is_another_one_by_now(change: str, tmp_path: Path) -> None:
    """What was counted and does not come would be lost without a word."""
    path = tmp_path / "x.tar"
    url = write_tar(path, members(["a.txt", "b.txt", "c.txt", "a.cls", "d.txt"]))
    plan = report_shard(url, ValidationRules(), 20).plan
    if change == "cut":
        path.write_bytes(path.read_bytes()[:1200])
    elif change == "gone":
        path.unlink()
    elif change == "other":
        write_tar(path, members(["a.txt", "b.txt", "b.txt", "c.txt", "a.cls", "d.txt"]))
    else:
        write_tar(path, members(["a.txt", "b.txt", "c.txt", "e.cls", "d.txt"]))
    with pytest.raises(ShardFormatError, match="not the same on a second reading"):
        list(repaired_samples(url, plan, ValidationRules()))


# ------------------------------------------------------------------------------------------------------------ reports
def test_reports_keep_the_first_findings_of_a_kind_and_count_all(tmp_path: Path) -> None:
    """Of each kind as many as asked for; the rest is counted."""
    url = write_tar(tmp_path / "x.tar", members(["README", "a.txt", "LICENSE", "b.", "b.txt", "NOTICE"]))
    report = report_shard(url, ValidationRules(), 2)
    assert [finding.member for finding in report.findings] == ["README", "LICENSE", "b."]
    assert report.counts == {("warning", "no-extension"): 3, ("warning", "empty-extension"): 1}
    assert report.left_out == {("warning", "no-extension"): 1}
    assert report_shard(url, ValidationRules(), 0).findings == []


def test_results_compare_fields_over_all_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shard all of whose samples lack a field is unlike the others."""
    results = Results(Namespace(json=False, fix=None, most=1))
    for number, fields in enumerate((("cls", "txt"), ("cls", "txt"), ("txt",))):
        names = [f"{key}.{field}" for key in "ab" for field in fields]
        results.take(report_shard(write_tar(tmp_path / f"{number}.tar", members(names)), ValidationRules(), 20))
    results.take(report_shard(str(tmp_path / "no.tar"), ValidationRules(), 20))
    assert (results.shards, results.samples) == ({"good": 3, "bad": 1}, {"good": 6, "bad": 0})
    capsys.readouterr()
    results.take_fields()
    assert capsys.readouterr().out.startswith(
        f"{tmp_path}/2.tar:0: note: other-fields: 2 samples do not have the fields"
    )
    assert {level: count for (level, _), count in results.counts.items()} == {"error": 1, "note": 2}
