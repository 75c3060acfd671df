"""YAML at the head of a README: what is written can be parsed, and what others wrote stays."""

from typing import Any

import pytest
import yaml

from torchdata_wds.cli.card.front_matter import Entry, divide, replace, scalar_of, with_tag, yaml_lines
from torchdata_wds.cli.card.hub import path_patterns, size_category


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": "no",
            "b": "1K<n<10K",
            "c": "*.tar",
            "d": "a: b",
            "e": "# x",
            "f": "",
            "g": " x",
            "h": "1e3",
            "i": 7,
            "j": 1.5,
        },
        {"list": ["x", ["y", "z"], {"k": "v", "w": ["q"]}, {}, []], "none": None, "flag": True, "n": "\u00e4\n'\"\\"},
        {"a b": {"c": {"d": ["2020-01-01", "~", "null", "- x", "x:", "x #y", ".inf", "0x1f", "!t", "&a", "@x"]}}},
    ],
)
def test_yaml_reads_back_when_written(value: dict[str, Any]) -> None:
    """With PyYAML, which the hub and datasets use."""
    assert yaml.safe_load("\n".join(yaml_lines(value))) == value


def test_readme_without_front_matter_is_all_text() -> None:
    """A line of dashes further down is not its begin."""
    for text in ("", "# Title\n---\na: b\n---\n", "----\n"):
        assert divide(text) == ([], text)


def test_entries_keep_their_lines_when_one_is_replaced() -> None:
    """Comments stay with the key after them, and lists with the key before them."""
    head = '---\n\na: 1\n# about b\nb:\n- x\n\n- y\n"c": 2\n---\n'
    with pytest.raises(Exception, match="a line other than 'key: value'"):
        divide(head)
    entries, text = divide(head.replace('"c"', "c").replace("---\n", "---  \n", 1) + "text\n")
    assert entries == [Entry("a", "\na: 1\n"), Entry("b", "# about b\nb:\n- x\n\n- y\n"), Entry("c", "c: 2\n")]
    assert (text, scalar_of(entries, "a"), scalar_of(entries, "b"), scalar_of(entries, "z")) == (
        "text\n",
        "1",
        None,
        None,
    )
    assert replace(entries, {"c": ["q"], "d": "e"}) == "---\n\na: 1\n# about b\nb:\n- x\n\n- y\nc:\n- q\nd: e\n---\n"


def test_front_matter_may_have_line_ends_of_windows() -> None:
    """They stay."""
    entries, text = divide("---\r\na: 1\r\ntags:\r\n- b\r\n---\r\ntext\r\n")
    assert (entries, text) == ([Entry("a", "a: 1\r\n"), Entry("tags", "tags:\r\n- b\r\n")], "text\r\n")
    assert scalar_of(entries, "a") == "1"


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ("tags: [a, b]\n", ["webdataset", "a", "b"]),
        ("tags: []\n", ["webdataset"]),
        ("tags:\n  - a\n", ["a", "webdataset"]),
        ("tags:\n- webdataset\n- b\n", ["webdataset", "b"]),
        ("other: 1\n", ["webdataset"]),
    ],
)
def test_tag_joins_those_that_are_there(tags: str, expected: list[str]) -> None:
    """In either style of a list."""
    entries, _ = divide(f"---\n{tags}---\n")
    assert yaml.safe_load(replace(with_tag(entries, "webdataset"), {}).strip("-\n"))["tags"] == expected


def test_globs_match_exactly_the_shards(tmp_path: Any) -> None:
    """A folder with more files than the card is about has each shard named."""
    for name in ("v2/a-000.tar", "v2/a-001.tar", "v2/a-002.tar", "v2/b.tar"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    names = ["v2/a-000.tar", "v2/a-001.tar", "v2/b.tar"]
    assert path_patterns(names, tmp_path) == names
    assert path_patterns([*names, "v2/a-002.tar"], tmp_path) == ["v2/a-*.tar", "v2/b.tar"]
    assert [size_category(10**power) for power in (0, 5, 15)] == ["n<1K", "100K<n<1M", "n>1T"]
