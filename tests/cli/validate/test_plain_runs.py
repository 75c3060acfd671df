"""Validation of many samples at once: the same findings, samples and counts as one by one."""

import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kits.odd_archives import odd_archive
from tests.kits.readers import READERS, reading_with
from tests.kits.shards import sample_members, tar_bytes
from torchdata_wds import index_shard
from torchdata_wds.cli.validate import shard_validation
from torchdata_wds.cli.validate.findings import Finding, ValidationRules
from torchdata_wds.cli.validate.shard_validation import ShardValidation, report_shard


def some_rules(random: Random) -> ValidationRules:
    """Rules by which shards may be read."""
    return ValidationRules(
        keys=random.choice(["first_dot", "first_dot", "last_dot"]),
        lowercase=random.random() < 0.8,
        on_duplicate=random.choice(["error", "error", "first", "last"]),
        on_reappearing=random.choice(["error", "error", "warn", "allow"]),
        require_end_marker=random.random() < 0.8,
        concatenated=random.random() < 0.2,
        max_member_bytes=random.choice([4 << 30, 4 << 30, 600]),
    )


def text_of(report: Any) -> str:
    """A report as text, its sets of fields too."""
    sets = report.field_sets
    return repr((report.findings, report.counts, report.left_out, report.sound, report.bad, report.plan, vars(sets)))


def outcome(url: str, rules: ValidationRules) -> list[Any]:
    """All that validation gives: findings, samples, and its reports with all samples and with few."""
    validation = ShardValidation(url, rules)
    items = list(validation)
    findings = [item for item in items if isinstance(item, Finding)]
    for finding in findings:
        validation.report.add(finding, 20)
    report = report_shard(url, rules, 20)
    # the shards of notes on fields come in the order in which the sets of fields were met
    samples = [item for item in items if not isinstance(item, Finding)]
    return [findings, samples, *map(text_of, (validation.report, report)), list(report.field_sets.findings())]


def differences(seeds: range, folder: Path) -> list[int]:
    """The seeds of archives whose validation differs between the readers."""
    different = []
    path = folder / "x.tar"
    for seed in seeds:
        random = Random(seed)
        path.write_bytes(odd_archive(random))
        rules = some_rules(random)
        url = random.choice([str(path), str(path), f"pipe:cat {path}"]) if seed % 20 == 0 else str(path)
        found = []
        for sizes in READERS.values():
            with reading_with(sizes):
                found.append(outcome(url, rules))
        if found.count(found[0]) < len(found) or found[0][2] != found[0][3]:
            different.append(seed)
    return different


@pytest.fixture(autouse=True)
def no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of odd archives have much to warn about."""
    caplog.set_level(logging.CRITICAL, "torchdata_wds")


@pytest.mark.slow
def test_validation_is_the_same_by_windows_and_one_by_one(tmp_path: Path) -> None:
    """Findings, samples and counts, of whole and damaged archives and by several rules."""
    assert not differences(range(40), tmp_path)


@pytest.mark.slow
def test_validation_is_the_same_by_windows_and_one_by_one_in_a_long_campaign(tmp_path: Path) -> None:
    """As above, with five thousand archives."""
    assert not differences(range(1000, 6000), tmp_path)


def test_plain_samples_are_counted_without_a_closer_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand plain samples, few are looked at one by one; an odd one in their midst is."""
    path = tmp_path / "x.tar"
    members = [member for number in range(1000) for member in sample_members(f"{number:04d}", cls=b"1", txt=b"words")]
    members[1001] = (members[1001][0], b"")
    path.write_bytes(tar_bytes(members))
    looked_at = []
    check = shard_validation.odd_headers
    monkeypatch.setattr(shard_validation, "odd_headers", lambda entry, raw: looked_at.append(1) or check(entry, raw))
    report = report_shard(str(path), ValidationRules(), 20)
    assert [(finding.kind, finding.member) for finding in report.findings] == [("empty-field", "0500.txt")]
    assert (report.sound, report.bad) == (1000, 0)
    assert len(looked_at) < 100


def test_plain_samples_are_compared_with_the_index(tmp_path: Path) -> None:
    """An index whose rows differ in the middle of a window is stale."""
    path = tmp_path / "x.tar"
    members = [member for number in range(300) for member in sample_members(f"{number:04d}", cls=b"1", txt=b"words")]
    path.write_bytes(tar_bytes(members))
    index_shard(path)
    assert report_shard(str(path), ValidationRules(), 20).findings == []
    members[400] = (members[400][0].replace("0200", "0xxx"), members[400][1])
    members[401] = (members[401][0].replace("0200", "0xxx"), members[401][1])
    path.write_bytes(tar_bytes(members))
    (finding,) = report_shard(str(path), ValidationRules(), 20).findings
    assert finding.kind == "index"
    assert "sample 200 is '0xxx'" in finding.message
