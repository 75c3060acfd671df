"""Validation finds all that loading refuses, loses or passes over, each with its place, and nothing in good shards."""

import gzip
import io
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.damage import DAMAGES, GOOD
from tests.kits.processes import open_files
from tests.kits.shards import END, tar_bytes, text_samples, write_tar
from torchdata_wds import ReappearingKeyError, index_shard
from torchdata_wds.cli.validate import shard_validation
from torchdata_wds.cli.validate.findings import FieldSets, Finding, ValidationRules
from torchdata_wds.cli.validate.shard_validation import CheckedSample, ShardValidation
from torchdata_wds.format.samples.grouping import Draft, make_sample
from torchdata_wds.handlers import ignore_and_continue

KINDS = {
    "bad checksum of the first header": "no-tar",
    "bad checksum inside a sample": "bad-header",
    "bad checksum at a new sample": "bad-header",
    "cut inside the first header": "no-tar",
    "a zero-byte file": "empty",
    "text that is no tar": "no-tar",
    "short text that is no tar": "no-tar",
    "bytes behind the end marker": "trailing-bytes",
    "a second archive behind the end marker": "trailing-bytes",
}
COMPRESSED = ("gzip", "bz2", "xz", "zstd")


def findings_of(url: str, **options: Any) -> list[Finding]:
    """All findings, those about the fields of the shard last."""
    validation = ShardValidation(url, ValidationRules(**options))
    return [*(item for item in validation if isinstance(item, Finding)), *validation.report.field_sets.findings()]


def found(url: str, **options: Any) -> list[tuple[str, str]]:
    """Levels and kinds of all findings."""
    return [(finding.level, finding.kind) for finding in findings_of(url, **options)]


def loaded(url: str, **options: Any) -> list[dict[str, Any]]:
    """What the pipes give, with everything skipped that they refuse."""
    loader = IterableWrapper([url]).load_wds_shards(handler=ignore_and_continue)
    return list(loader.group_by_key(handler=ignore_and_continue, **options))


def sound(url: str, **rules: Any) -> list[dict[str, Any]]:
    """The samples that validation has nothing against."""
    items = ShardValidation(url, ValidationRules(**rules))
    checked = [item for item in items if isinstance(item, CheckedSample)]
    return [item.sample for item in checked if item.is_sound and not item.reappears]


def archive(*members: tarfile.TarInfo | tuple[str, bytes], tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive of files and other entries."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    """An entry without content."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


# ------------------------------------------------------------------------------------------------ damaged archives
@pytest.mark.parametrize("name", DAMAGES)
def test_validate_finds_each_damage_with_its_place(name: str, tmp_path: Path) -> None:
    """One error that says where, what is whole before it, and no other."""
    path = tmp_path / "x.tar"
    path.write_bytes(DAMAGES[name].data)
    before = open_files()
    [finding] = findings_of(str(path))
    expected = "compression" if any(word in name for word in COMPRESSED) else KINDS.get(name, "cut")
    assert (finding.level, finding.kind, finding.shard) == ("error", expected, str(path))
    assert DAMAGES[name].says in finding.message
    assert finding.offset is not None
    if expected != "compression" and "byte" in DAMAGES[name].says:
        assert DAMAGES[name].says.endswith(f"byte {finding.offset:,}")
    count = len(DAMAGES[name].complete)
    assert f"{count} sample" in finding.message
    assert open_files() <= before


@pytest.mark.parametrize("name", DAMAGES)
def test_validate_counts_the_samples_that_loading_gives_when_damaged(name: str, tmp_path: Path) -> None:
    """The pipes and validation agree about what is whole."""
    path = tmp_path / "x.tar"
    path.write_bytes(DAMAGES[name].data)
    assert sound(str(path)) == loaded(str(path))


@pytest.mark.parametrize("kind", ["plain", "gzip", "empty", "PAX", "concatenated"])
def test_validate_passes_good_shards(kind: str, tmp_path: Path) -> None:
    """Nothing is found in them, not even a note."""
    path = tmp_path / "x.tar"
    data = {
        "plain": GOOD,
        "gzip": gzip.compress(GOOD),
        "empty": END,
        "PAX": tar_bytes([("d/" + "long" * 40 + ".txt", b"x")], tar_format=tarfile.PAX_FORMAT),
        "concatenated": GOOD + tar_bytes(text_samples("s", 2)),
    }
    path.write_bytes(data[kind])
    findings = findings_of(str(path), concatenated=kind == "concatenated")
    assert [finding for finding in findings if finding.level != "note"] == []


def test_validate_reports_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is not there, and a command that may not be run; secrets are masked."""
    assert found(str(tmp_path / "no.tar")) == [("error", "unreadable")]
    assert found("pipe:exit 3") == [("error", "unreadable")]
    monkeypatch.setenv("WDS_SECURE", "1")
    [finding] = findings_of("pipe:curl --token=geheim https://host/x.tar")
    assert (finding.level, finding.kind) == ("error", "refused")
    assert "geheim" not in finding.message + finding.shard


def test_validate_takes_markers_as_it_is_told(tmp_path: Path) -> None:
    """Without an end marker, and behind one."""
    path = tmp_path / "x.tar"
    path.write_bytes(GOOD[:-1024])
    assert found(str(path), require_end_marker=False) == []
    path.write_bytes(GOOD + GOOD)
    assert Counter(found(str(path), concatenated=True)) == {("error", "reappearing-key"): 3}


# ------------------------------------------------------------------------------------------------------ wrong samples
def test_validate_goes_on_behind_wrong_samples(tmp_path: Path) -> None:
    """All of them are found in one reading, more than one in a sample, each at its member."""
    members = [
        ("a.txt", b"1"),
        ("a.TXT", b"2"),
        ("a.__key__", b"3"),
        ("a.txt", b"4"),
        ("b.txt", b"5"),
        ("a.cls", b"6"),
        ("c.__url__", b"7"),
        ("d.txt", b"8"),
    ]
    url = write_tar(tmp_path / "x.tar", members)
    findings = findings_of(url)
    assert [(finding.kind, finding.member, finding.offset) for finding in findings if finding.level == "error"] == [
        ("duplicate-field", "a.TXT", 1024),
        ("reserved-field", "a.__key__", 2048),
        ("duplicate-field", "a.txt", 3072),
        ("reappearing-key", "a.cls", 5120),
        ("reserved-field", "c.__url__", 6144),
    ]
    assert [(finding.key, finding.field) for finding in findings[:2]] == [("a", "TXT"), ("a", "__key__")]
    assert [sample["__key__"] for sample in sound(url)] == ["b", "d"]
    assert sound(url) == loaded(url)


def test_validate_looks_at_each_member_a_few_times_in_a_sample_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many fields there are, and however many of them are wrong."""
    looked = []

    def count(draft: Draft, *rest: Any) -> dict[str, Any]:
        looked.append(len(draft.parts))
        return make_sample(draft, *rest)

    monkeypatch.setattr(shard_validation, "make_sample", count)
    url = write_tar(tmp_path / "x.tar", [(f"a.f{number % 150}", b"x") for number in range(200)])
    assert Counter(found(url)) == {("error", "duplicate-field"): 50}
    assert sum(looked) < 5 * 200


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"on_duplicate": "first"}, ("error", "reappearing-key")),
        ({"lowercase": False}, ("error", "reappearing-key")),
        ({"on_duplicate": "last", "on_reappearing": "warn"}, ("warning", "reappearing-key")),
        ({"on_duplicate": "last", "on_reappearing": "allow"}, None),
    ],
)
def test_validate_judges_by_the_options_of_grouping(
    options: dict[str, Any], expected: tuple[str, str] | None, tmp_path: Path
) -> None:
    """What a training run takes is no error."""
    url = write_tar(tmp_path / "x.tar", [("a.txt", b"1"), ("a.TXT", b"2"), ("b.txt", b"3"), ("a.txt", b"4")])
    findings = [finding for finding in found(url, **options) if finding[0] != "note"]
    assert findings == ([] if expected is None else [expected])


def test_validate_reports_a_key_that_comes_back_once_for_each_time(tmp_path: Path) -> None:
    """With the place of each."""
    findings = findings_of(write_tar(tmp_path / "x.tar", [(f"{key}.txt", b"x") for key in "abaca"]))
    assert [(finding.kind, finding.offset) for finding in findings] == [
        ("reappearing-key", 2048),
        ("reappearing-key", 4096),
    ]


def test_validate_reports_a_rule_that_fails(tmp_path: Path) -> None:
    """The member is left out, the others are read."""

    def rule(name: str) -> tuple[str, str] | None:
        return None if name.startswith("skip") else (name.split(".")[0], name.split(".")[1])

    url = write_tar(tmp_path / "x.tar", [("a.txt", b"1"), ("README", b"2"), ("skip.txt", b"3"), ("b.txt", b"4")])
    assert found(url, keys=rule) == [("error", "key-rule"), ("warning", "no-key")]
    assert [sample["__key__"] for sample in sound(url, keys=rule)] == ["a", "b"]
    with pytest.raises(ValueError, match="on_duplicate"):
        ShardValidation(url, ValidationRules(on_duplicate="no"))  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- odd members
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("d.v1/README", "no-extension"),
        ("a.", "empty-extension"),
        (".hidden", "hidden-file"),
        ("d/.hidden.jpg", "hidden-file"),
        ("d/._a.jpg", "macos-metadata"),
        ("__MACOSX/a.jpg", "macos-metadata"),
        (".DS_Store", "macos-metadata"),
        ("__meta__/x.json", "metadata"),
        ("/etc/a.jpg", "absolute-name"),
        ("d/../a.jpg", "parent-folder"),
    ],
)
def test_validate_warns_of_odd_names(name: str, kind: str, tmp_path: Path) -> None:
    """With the member's place; the samples around are good."""
    url = write_tar(tmp_path / "x.tar", [("0.txt", b"x"), (name, b"x"), ("z.txt", b"x")])
    findings = [finding for finding in findings_of(url) if finding.level != "note"]
    assert [(finding.level, finding.kind, finding.offset) for finding in findings] == [("warning", kind, 1024)]
    assert name in findings[0].message
    assert sound(url) == loaded(url)


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("length", [1, 70])
def test_validate_tells_names_that_are_not_utf_8_from_backslashes(tar_format: int, length: int, tmp_path: Path) -> None:
    """A name that looks like an escaped one is none."""
    folder = "d" * 60 + "/" + "e" * length + "/"
    good = tar_bytes([(folder + "\\xe9.txt", b"x")], tar_format=tar_format)
    path = tmp_path / "x.tar"
    path.write_bytes(good)
    assert found(str(path)) == []
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo(folder + "\xe9.txt"))
    path.write_bytes(out.getvalue())
    assert ("warning", "not-utf-8") in found(str(path))


@pytest.mark.parametrize(
    ("member", "level", "kind"),
    [
        (special("a.lnk", tarfile.SYMTYPE, "/etc/passwd"), "warning", "symbolic-link"),
        (special("a.dev", tarfile.CHRTYPE), "warning", "character-device"),
        (special("a.dev", tarfile.BLKTYPE), "warning", "block-device"),
        (special("a.pipe", tarfile.FIFOTYPE), "warning", "fifo"),
        (special("a.volume", b"V"), "warning", "unknown-entry"),
        (special("a.jpg", tarfile.LNKTYPE, "no-such.jpg"), "error", "hard-link"),
        (special("folder.d", tarfile.DIRTYPE), "", ""),
        (special("a.jpg", tarfile.LNKTYPE, "0.txt"), "", ""),
        (("a.jpg", b""), "warning", "empty-field"),
        (("a.__note__", b"x"), "warning", "metadata-field"),
    ],
)
def test_validate_finds_members_that_are_no_files(member: Any, level: str, kind: str, tmp_path: Path) -> None:
    """What is passed over is told; what ends a loader is an error, and the samples behind it are looked at too."""
    path = tmp_path / "x.tar"
    path.write_bytes(archive(("0.txt", b"x"), member, ("z.txt", b"x"), ("z.txt", b"again")))
    findings = [finding for finding in findings_of(str(path)) if finding.level != "note"]
    expected = [(level, kind, 1024)] if level else []
    assert [(finding.level, finding.kind, finding.offset) for finding in findings[:-1]] == expected
    assert findings[-1].kind == "duplicate-field"


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([special("a.jpg", tarfile.SYMTYPE, "b.jpg"), ("README", b"x")], ["no-samples"]),
        ([("README", b"x")], ["no-samples"]),
        ([special("folder.d", tarfile.DIRTYPE)], []),
        ([], []),
        ([special("a.jpg", tarfile.SYMTYPE, "b.jpg"), ("b.txt", b"x")], []),
        ([("a.jpg", b"1"), ("a.jpg", b"2")], ["duplicate-field"]),
    ],
)
def test_validate_finds_a_shard_that_gives_nothing(members: Any, expected: list[str], tmp_path: Path) -> None:
    """All of whose members are passed over: an error, as for what is lost. One without members is a valid shard."""
    path = tmp_path / "x.tar"
    path.write_bytes(archive(*members))
    errors = [finding for finding in findings_of(str(path)) if finding.level == "error"]
    assert [finding.kind for finding in errors] == expected
    text = f"the shard has no samples: loaders pass over all of its members ({len(members)})"
    assert {finding.message for finding in errors if finding.kind == "no-samples"} <= {text}


def test_validate_does_not_take_the_sample_of_a_dangling_link_as_sound(tmp_path: Path) -> None:
    """A field is missing in it."""
    path = tmp_path / "x.tar"
    path.write_bytes(archive(("a.txt", b"x"), special("a.jpg", tarfile.LNKTYPE, "no"), ("b.txt", b"x")))
    assert [sample["__key__"] for sample in sound(str(path))] == ["b"]


# ------------------------------------------------------------------------------------------------------------- fields
def test_validate_notes_samples_whose_fields_are_unlike_the_majority(tmp_path: Path) -> None:
    """One note for a set, that says what is missing and more."""
    members = [(f"{key}.{field}", b"1") for key in "abcdef" for field in ("cls", "txt")]
    url = write_tar(tmp_path / "x.tar", [*members, ("g.txt", b"1"), ("h.txt", b"1"), ("i.txt", b"1"), ("i.jpg", b"1")])
    [first, second] = findings_of(url)
    assert (first.level, first.kind, first.key, first.samples) == ("note", "other-fields", "g", 2)
    assert "6 of 9: cls, txt" in first.message
    assert "cls is missing" in first.message
    assert (second.key, second.samples) == ("i", 1)
    assert "jpg is extra" in second.message


def test_field_sets_say_nothing_without_a_majority() -> None:
    """Half is none; different shards count together."""
    sets, more = FieldSets(), FieldSets()
    assert list(sets.findings()) == []
    sets.add(["a"], "x.tar", "1", 0)
    more.add(["b", "__key__"], "y.tar", "1", 0)
    sets.update(more)
    assert list(sets.findings()) == []
    sets.update(more)
    [finding] = sets.findings()
    assert finding.shard == "x.tar"


def test_validate_asks_about_fields(tmp_path: Path) -> None:
    """What it is told lies where the field's member does; other samples are sound."""

    def check(sample: Any) -> Any:
        if sample["__key__"] == "b":
            error = ReappearingKeyError("wrong", field="txt")
            yield error
        elif sample["__key__"] == "c":
            yield ImportError("no package")

    url = write_tar(tmp_path / "x.tar", [(f"{key}.{field}", b"1") for key in "abc" for field in ("cls", "TXT")])
    findings = findings_of(url, check_fields=check)
    assert [(finding.level, finding.kind, finding.member, finding.offset) for finding in findings] == [
        ("error", "undecodable", "b.TXT", 3072),
        ("note", "not-decoded", "c.cls", 4096),
    ]
    assert [sample["__key__"] for sample in sound(url, check_fields=check)] == ["a", "c"]


# -------------------------------------------------------------------------------------------------------------- index
def _rewrite(members: list[tuple[str, bytes]]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(tar_bytes(members)) and None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_rewrite(text_samples("s", 4)), "bytes"),
        (_rewrite(text_samples("t", 3)), "'t00000'"),
        (lambda path: path.with_name(".wds-index").joinpath("x.tar.index").write_bytes(b"{}\n"), "not an index"),
    ],
    ids=["other size", "same size", "no index"],
)
def test_validate_finds_an_index_that_is_not_of_the_shard(
    change: Callable[[Path], Any], says: str, tmp_path: Path
) -> None:
    """Of a shard of another length or with other keys, or damaged."""
    path = tmp_path / "x.tar"
    write_tar(path, text_samples("s", 3))
    index_shard(path)
    assert found(str(path)) == []
    change(path)
    [finding] = findings_of(str(path))
    assert (finding.level, finding.kind) == ("error", "index")
    assert says in finding.message


def test_validate_compares_all_of_an_index(tmp_path: Path) -> None:
    """A count, a place, and nothing where the index has other rules."""
    path = tmp_path / "x.tar"
    write_tar(path, text_samples("s", 3))
    index_shard(path)
    index = tmp_path / ".wds-index" / "x.tar.index"
    head, first, *rest = index.read_bytes().splitlines(keepends=True)
    for broken in (
        b"".join([head.replace(b'"samples": 3', b'"samples": 2'), first, *rest[:1]]),
        b"".join([head, first.replace(b"0,", b"512,", 1), *rest]),
        b"".join([head, b"[]\n", *rest]),
        b"".join([head.replace(b'"tar_bytes": ', b'"tar_bytes": 1'), first, *rest]),
    ):
        index.write_bytes(broken)
        assert found(str(path)) == [("error", "index")]
    index_shard(path, keys="last_dot")
    assert found(str(path)) == []


def test_validate_does_not_blame_the_index_for_a_broken_shard(tmp_path: Path) -> None:
    """It is that of the whole one; what is not an index is told nevertheless."""
    path = tmp_path / "x.tar"
    write_tar(path, text_samples("s", 3))
    index_shard(path)
    path.write_bytes(path.read_bytes()[:-5000])
    assert found(str(path)) == [("error", "cut")]
    (tmp_path / ".wds-index" / "x.tar.index").write_bytes(b"")
    assert found(str(path)) == [("error", "cut"), ("error", "index")]


def test_validate_reports_a_member_when_it_is_larger_than_the_limit(tmp_path: Path) -> None:
    """As loaders end the shard there, so does the validation."""
    path = tmp_path / "x.tar"
    write_tar(path, [("a.txt", b"a"), ("b.txt", bytes(2000))])
    findings = findings_of(str(path), max_member_bytes=1999)
    assert [(finding.kind, finding.member, finding.offset) for finding in findings] == [("too-large", "b.txt", 1024)]
