"""Patterns of numbered shards, and which of their shards a file is."""

from pathlib import Path

import pytest

from torchdata_wds.cli.split import number_of, numbered_pattern
from torchdata_wds.format.shards import ShardNames


@pytest.mark.parametrize("name", ["", "-"])
def test_no_pattern_is_made_of_what_is_no_name(name: str) -> None:
    """Several shards cannot go to one place."""
    with pytest.raises(ValueError, match="need a name"):
        numbered_pattern(name)


@pytest.mark.parametrize(
    ("pattern", "url", "expected"),
    [
        ("x1%d1.tar", "x1171.tar", 17),
        ("x1%d1.tar", "x11.tar", None),
        ("%06d.tar", "1234567.tar", 1234567),
        ("%06d.tar", "000000.tar", 0),
        ("%06d.tar", "0000000.tar", None),
        ("%040d.tar", f"{7:040d}.tar", 7),
        ("%d.tar", f"{'1' * 200}.tar", None),
        ("%d.tar", "a/7.tar", None),
        ("a/%d/x.tar", "a/../a/7/x.tar", 7),
        ("s3://a/%d.tar", "s3://a/7.tar", 7),
        ("s3://a/%d.tar", "a/7.tar", None),
        ("%d.tar", "-", None),
        ("pipe:cat > %d.tar", "7.tar", None),
    ],
)
def test_number_of_a_file_is_that_of_the_shard_that_would_replace_it(
    pattern: str, url: str, expected: int | None
) -> None:
    """None where no shard would."""
    assert number_of(ShardNames(pattern), url) == expected


def test_number_of_a_file_is_found_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of folders and of the file, which is read at the link's end; a link in a shard's place is replaced itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in folder").mkdir()
    (tmp_path / "out").symlink_to("in folder")
    (tmp_path / "link.tar").symlink_to("out/x-3.tar")
    (tmp_path / "out/x-4.tar").symlink_to("/elsewhere")
    names = ShardNames("out/x-%d.tar")
    urls = ["in folder/x-2.tar", "link.tar", "out/x-4.tar", f"file:{tmp_path}/in%20folder/x-5.tar", "x-6.tar"]
    assert [number_of(names, url) for url in urls] == [2, 3, 4, 5, None]
