"""The command ``card``: what its files say, and what it leaves alone."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kits.servers import serve_folder
from tests.kits.shards import Members, image_samples, sample_members, text_samples, write_tar, write_text_shards
from tests.kits.tool_kit import run_wds
from torchdata_wds import index_shard
from torchdata_wds.cli.card.splits import assign_splits
from torchdata_wds.cli.command import UsageError

IMAGES: Members = [*sample_members("a", jpg=b"x" * 30, cls=b"1"), *sample_members("b", jpg=b"y" * 10, cls=b"2")]


def front_matter(folder: Path) -> dict[str, Any]:
    """The front matter of a README, parsed."""
    _, head, _ = (folder / "README.md").read_text().split("---\n", 2)
    found: dict[str, Any] = yaml.safe_load(head)
    return found


def write_set(folder: Path, members: Members = IMAGES) -> str:
    """Two shards for training and one for tests; returns a glob for them."""
    for name, count in (("train-0", 0), ("train-1", 1), ("test-0", 2)):
        write_tar(folder / f"{name}.tar", [(f"{count}{key}", data) for key, data in members])
    return f"{folder}/*.tar"


def test_card_says_what_is_in_the_shards_when_run(tmp_path: Path) -> None:
    """Splits, globs, types, counts and sizes for the hub; nothing that only the owner knows."""
    done = run_wds("card", "-p", 1, write_set(tmp_path))
    assert (done.status, done.err) == (0, "wds: 2 files written, 0 unchanged (6 samples of 3 shards)\n")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert front_matter(tmp_path) == {
        "tags": ["webdataset"],
        "size_categories": ["n<1K"],
        "configs": [
            {
                "config_name": "default",
                "data_files": [
                    {"split": "train", "path": "train-*.tar"},
                    {"split": "test", "path": "test-0.tar"},
                ],
            }
        ],
        "dataset_info": {
            "features": [
                {"name": "jpg", "dtype": "image"},
                {"name": "cls", "dtype": "int64"},
                {"name": "__key__", "dtype": "string"},
                {"name": "__url__", "dtype": "string"},
            ],
            "splits": [
                {"name": "train", "num_bytes": 84, "num_examples": 4},
                {"name": "test", "num_bytes": 42, "num_examples": 2},
            ],
            "download_size": size,
            "dataset_size": 126,
        },
    }
    text = (tmp_path / "README.md").read_text()
    assert f"# {tmp_path.name}\n\n<!-- wds card" in text
    assert "| train | 4 | 2 |" in text
    assert "| `jpg` | image | 6 | 120 B | 20 B |" in text
    assert 'WebDataset("train-*.tar")' in text


def test_croissant_has_digests_types_and_fields_when_written(tmp_path: Path) -> None:
    """A file set leaves out the fields whose names end in its own."""
    members = [*sample_members("a", png=b"x"), ("a.seg.png", b"yy")]
    shard = Path(write_tar(tmp_path / "x.tar", members))
    options = ("--name", "Things", "--license", "mit", "--url", "https://example.org", "--description", "Some things.")
    assert run_wds("card", "-p", 1, shard, *options).status == 0
    croissant = json.loads((tmp_path / "croissant.json").read_text())
    assert [croissant[key] for key in ("name", "license", "url", "description")] == list(options[1::2])
    assert run_wds("card", "-p", 1, shard, "--check").status == 0  # nothing has to be said again
    archive, plain, longer = croissant["distribution"]
    assert archive["sha256"] == hashlib.sha256(shard.read_bytes()).hexdigest()
    assert (archive["contentUrl"], archive["contentSize"]) == ("x.tar", f"{shard.stat().st_size} B")
    assert (plain["includes"], plain["excludes"], plain["encodingFormat"]) == ("*.png", ["*.seg.png"], "image/png")
    assert (longer["includes"], "excludes" in longer) == ("*.seg.png", False)
    assert [record["@id"] for record in croissant["recordSet"]] == ["train/png", "train/seg.png"]
    key, content = croissant["recordSet"][1]["field"]
    assert key["source"]["transform"] == {"regex": r"^((?:.*/)?[^/.]+)\.seg\.png$"}
    assert content["dataType"] == "sc:ImageObject"


def test_card_keeps_what_a_readme_says_when_there_is_one(tmp_path: Path) -> None:
    """Other keys, comments, tags and text; its license goes into croissant.json."""
    urls = write_set(tmp_path)
    readme = tmp_path / "README.md"
    head = "# mine\nlicense: 'cc0-1.0'\ntags:\n  - birds\n# which?\nconfigs: old\npaper: |\n  ab: c\n"
    readme.write_text(f"---\n{head}---\n\nAll *my* text.\n")
    assert run_wds("card", "-p", 1, urls).status == 0
    now = readme.read_text()
    assert now.startswith(
        "---\n# mine\nlicense: 'cc0-1.0'\ntags:\n  - birds\n  - webdataset\n# which?\nconfigs:\n- config_name:"
    )
    assert "\npaper: |\n  ab: c\n" in now
    assert now.endswith("---\n\nAll *my* text.\n")
    assert front_matter(tmp_path)["dataset_info"]["dataset_size"] == 126
    assert json.loads((tmp_path / "croissant.json").read_text())["license"] == "cc0-1.0"
    again = run_wds("card", "-p", 1, urls)
    assert (readme.read_text(), again.err.partition(" (")[0]) == (now, "wds: 0 files written, 2 unchanged")


def test_card_replaces_its_own_part_when_the_shards_change(tmp_path: Path) -> None:
    """Text before and after it stays; croissant.json is replaced only by --force, and nothing without it."""
    urls = write_set(tmp_path)
    run_wds("card", "-p", 1, urls, "--task", "image-classification", "--language", "en")
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("<!-- wds card", "Before.\n\n<!-- wds card") + "\nAfter.\n")
    old = readme.read_text()
    write_tar(tmp_path / "test-1.tar", sample_members("new", jpg=b"", cls=b""))
    checked = run_wds("card", "-p", 1, urls, "--check")
    assert (checked.status, checked.text) == (1, "README.md: stale\ncroissant.json: stale\n")
    refused = run_wds("card", "-p", 1, urls)
    assert (refused.status, readme.read_text()) == (1, old)
    assert "another croissant.json. Pass --force" in refused.err
    assert run_wds("card", "-p", 1, urls, "--force").status == 0
    now = readme.read_text()
    assert "Before.\n\n<!-- wds card" in now
    assert now.endswith("<!-- end of wds card -->\n\nAfter.\n")
    assert "| test | 3 | 2 |" in now
    assert front_matter(tmp_path)["task_categories"] == ["image-classification"]
    assert run_wds("card", "-p", 1, urls, "--check").status == 0


def test_card_warns_when_the_first_samples_have_other_fields(tmp_path: Path) -> None:
    """Where types follow from the names, the card declares them, and nothing is inferred from the samples."""
    members = [*text_samples("s", 3), *sample_members("odd", txt=b"")]
    url = write_tar(tmp_path / "x.tar", members)
    done = run_wds("card", "-p", 1, url)
    assert done.status == 0
    assert "Sample 4 of x.tar has other fields than the first: not all have cls, json." in done.err
    assert "features" not in front_matter(tmp_path)["dataset_info"]
    assert run_wds("card", "-p", 1, url, "--check").status == 1
    write_tar(tmp_path / "x.tar", [*sample_members("a", txt=b"", cls=b"1"), *sample_members("b", txt=b"")])
    assert "warning" not in run_wds("card", "-p", 1, url, "--force").err
    assert run_wds("card", "-p", 1, url, "--check").status == 0
    write_tar(tmp_path / "y.tar.gz", IMAGES)
    assert (
        "only files named *.tar for WebDataset, not y.tar.gz"
        in run_wds("card", "-p", 1, tmp_path / "y.tar.gz", "--force").err
    )


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"cls": b"cat"}, "its field cls is not a whole number"),
        ({"txt": "\u00fc".encode("latin-1")}, "its field txt is not UTF-8 text"),
        ({"json": b"{"}, "its field json is not JSON"),
        ({"json": b"[" * 100_000}, "its field json is not JSON"),
        ({"cls.gz": b"cat", "note.txt": "\u00fc".encode(), "npy": b""}, None),
    ],
)
def test_card_warns_when_the_first_samples_cannot_be_decoded(
    fields: dict[str, bytes], told: str | None, tmp_path: Path
) -> None:
    """Only the first five are looked into, and only fields that datasets decodes."""
    url = write_tar(tmp_path / "x.tar", sample_members("a", **fields))
    done = run_wds("card", "-p", 1, url)
    assert (done.status, "warning" in done.err) == (0, told is not None)
    assert told is None or f"cannot read sample 1 of x.tar: {told}" in done.err
    assert run_wds("card", "-p", 1, url, "--check").status == (told is not None)


def test_card_uses_the_indexes_when_they_fit(tmp_path: Path) -> None:
    """An index of another version of the shard is not used, nor one with a damaged line."""
    url = write_tar(tmp_path / "x.tar", IMAGES)
    index_shard(url)
    sidecar = tmp_path / ".wds-index" / "x.tar.index"
    text = sidecar.read_text()
    sidecar.write_text(
        text.replace('["b.jpg",2560,10]', '["b.jpg",2560,7]').replace('"sha256": null', '"sha256": "77"')
    )
    assert sidecar.read_text() != text
    run_wds("card", "-p", 1, url)
    assert front_matter(tmp_path)["dataset_info"]["dataset_size"] == 39
    assert '"sha256": "77"' in (tmp_path / "croissant.json").read_text()
    sidecar.write_text(sidecar.read_text()[:-30] + "\n")
    run_wds("card", "-p", 1, url, "--force")
    assert front_matter(tmp_path)["dataset_info"]["dataset_size"] == 42


@pytest.mark.parametrize(
    ("paths", "splits"),
    [
        (["a.tar", "b.tar"], "train train"),
        (["train.tar", "my_valid-0.tar", "eval.1.tar"], "train validation test"),
        (["val/trained.tar", "training/0.tar"], "validation train"),
        (["data/extra-00000-of-00001.tar"], "extra"),
        (["data/all-00000-of-00001.tar", "data/the-dev-00000-of-00001.tar"], None),
        (["data/the-dev-00000-of-00001.tar"], "validation"),
    ],
)
def test_splits_follow_from_names_as_in_datasets(paths: list[str], splits: str | None) -> None:
    """Folders count before names, and only whole words."""
    if splits is None:
        with pytest.raises(UsageError, match=r"shard data/all-00000-of-00001.tar has no split in its name"):
            assign_splits(paths, [])
    else:
        assert list(assign_splits(paths, []).values()) == splits.split()


def test_split_rules_name_the_split_of_each_shard(tmp_path: Path) -> None:
    """By path or name; one without a glob has all."""
    urls = write_text_shards(tmp_path / "a", (1, 2, 1))
    rules = ("--split", "big=*1.tar", "--split", "small=*[02].tar")
    assert run_wds("card", "-p", 1, *urls, *rules, "-o", tmp_path, "--no-croissant").status == 0
    assert not (tmp_path / "croissant.json").exists()
    splits = front_matter(tmp_path)["dataset_info"]["splits"]
    assert [(split["name"], split["num_examples"]) for split in splits] == [("big", 2), ("small", 2)]
    assert run_wds("card", "-p", 1, *urls, "--split", "only").status == 0
    assert front_matter(tmp_path / "a")["configs"][0]["data_files"][0]["split"] == "only"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train-0.tar", "x.tar"], "x.tar has no split in its name, as others have"),
        (["train-val.tar"], "names the splits train and validation"),
        (["x.tar", "--split", "a=y*"], "belongs to 0 of the splits that --split names"),
        (["x.tar", "--split", "a b"], "expected NAME or NAME=GLOB"),
        (["x.tar", "--split", "all"], "'all' means all splits together"),
        (["x.tar", "x.tar"], "named twice"),
        (["x.tar", "-o", "other"], "is not in the folder of the card"),
        (["x.tar", "https://host/y.tar"], "some of the shards are local and others remote"),
        (["https://host/y.tar"], "name a local folder for the card"),
        (["https://me:secret@host/y.tar", "-o", "."], "would publish the secrets in https://me:***@host/y.tar"),
        (["pipe:cat x.tar", "-o", "."], "cannot refer to pipe:"),
        (["x[1].tar"], "takes the name of shard x[1].tar for a pattern"),
        (["x.tar", "--energon-ratio", "8,1,1"], "need --energon"),
        (["x.tar", "--energon", "--energon-ratio", "0,0,0"], "expected three numbers"),
        (["x.tar", "--energon", "--energon-sample", "image=jpg"], "expected TYPE:FIELD=NAME"),
    ],
)
def test_card_refuses_before_anything_is_written(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong arguments, with what to do."""
    monkeypatch.chdir(tmp_path)
    for name in ("train-0.tar", "train-val.tar", "x.tar", "x[1].tar"):
        write_tar(Path(name), IMAGES)
    before = sorted(tmp_path.iterdir())
    done = run_wds("card", "-p", 1, *arguments)
    assert done.status == 2
    assert told in done.err
    assert sorted(tmp_path.iterdir()) == before


def test_card_refuses_a_readme_whose_head_it_cannot_keep(tmp_path: Path) -> None:
    """Front matter that is not one key after another stays as it is."""
    url = write_tar(tmp_path / "x.tar", image_samples("s", 2))
    (tmp_path / "README.md").write_text("---\n{license: mit}\n---\n")
    done = run_wds("card", "-p", 1, url)
    assert (done.status, sorted(path.name for path in tmp_path.iterdir())) == (1, ["README.md", "x.tar"])
    assert "a line other than 'key: value': '{license: mit}'" in done.err
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: mine\n  x: y\n- {config_name: 'b'}\n---\n")
    assert "would be lost: mine, b. Choose another folder" in run_wds("card", "-p", 1, url).err
    assert run_wds("card", "-p", 1, url, "--force", "--no-croissant").status == 0
    (tmp_path / "README.md").write_bytes(b"\xff")
    assert "README.md is not UTF-8 text" in run_wds("card", "-p", 1, url).err


def test_example_of_the_card_runs_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours; those of webdataset and Hugging Face Datasets name the same shards."""
    run_wds("card", "-p", 1, write_set(tmp_path))
    monkeypatch.chdir(tmp_path)
    ours, *others = [part.partition("```")[0] for part in Path("README.md").read_text().split("```python\n")[1:]]
    found: dict[str, Any] = {}
    exec(ours, found)
    assert sorted(sample["__key__"] for sample in found["samples"]) == ["0a", "0b", "1a", "1b"]
    assert others[0].endswith('webdataset.WebDataset(sorted(glob.glob("train-*.tar")), shardshuffle=False)\n')
    assert others[1].endswith('load_dataset(".", split="train", streaming=True)\n')


def test_card_names_remote_shards_by_their_urls(tmp_path: Path) -> None:
    """It lies in a local folder, and none of their parts is a pattern."""
    (tmp_path / "data").mkdir()
    write_set(tmp_path / "data")
    with serve_folder(tmp_path / "data") as host:
        url = f"{host}/train-{{0,1}}.tar"
        assert run_wds("card", "-p", 1, url, "-o", tmp_path / "card").status == 0
        refused = run_wds("card", "-p", 1, url, "-o", tmp_path / "card", "--energon")
    urls = [f"{host}/train-{number}.tar" for number in (0, 1)]
    assert front_matter(tmp_path / "card")["configs"][0]["data_files"] == [{"split": "train", "path": urls}]
    croissant = json.loads((tmp_path / "card/croissant.json").read_text())
    assert [part["contentUrl"] for part in croissant["distribution"][:2]] == urls
    assert (refused.status, "--energon needs local ones" in refused.err) == (2, True)
