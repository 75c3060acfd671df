"""Listing shards as a stage: what patterns mean is tested with storage, here the pipe around it."""

import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_text_shards
from torchdata_wds import ShardListError


def listed(*patterns: Any, **options: Any) -> list[str]:
    return list(IterableWrapper(patterns).list_shards(**options))


def test_list_shards_yields_str_when_patterns_are_expanded(tmp_path: Path) -> None:
    """Braces, globs, folders, paths and nested lists become plain str, in order."""
    paths = write_text_shards(tmp_path / "a", (1, 1, 1))
    folder = tmp_path / "a"
    for pattern in (
        f"{folder}/shard-{{000000..000002}}.tar",
        f"{folder}/*.tar",
        str(folder),
        folder,
        paths,
        [paths[0], [paths[1], (paths[2],)]],
        "::".join(paths),
    ):
        found = listed(pattern)
        assert found == paths
        assert {type(url) for url in found} == {str}


def test_list_shards_keeps_duplicates_when_patterns_overlap(tmp_path: Path) -> None:
    """What is listed twice comes twice."""
    (path,) = write_text_shards(tmp_path, (1,))
    assert listed(path, Path(path), str(tmp_path)) == [path] * 3


def test_list_shards_looks_again_when_iterated_again(tmp_path: Path) -> None:
    """The list is made anew each epoch: shards may have come meanwhile."""
    pipe = IterableWrapper([str(tmp_path / "*.tar")]).list_shards()
    write_text_shards(tmp_path, (1,))
    assert len(list(pipe)) == 1
    write_text_shards(tmp_path, (1, 1))
    assert len(list(pipe)) == 2


@pytest.mark.parametrize("pattern", ["nothing-*.tar", "x", 3, None, b"a.tar"])
def test_list_shards_raises_when_a_pattern_gives_nothing(pattern: Any, tmp_path: Path) -> None:
    """A glob without a match, a letter of a str, and what is no pattern at all."""
    if isinstance(pattern, str) and len(pattern) > 1:
        pattern = str(tmp_path / pattern)
    with pytest.raises(ShardListError):
        listed(pattern)


def test_list_shards_says_what_to_do_when_a_str_was_wrapped() -> None:
    """IterableWrapper("x.tar") gives letters: the commonest slip."""
    with pytest.raises(ShardListError, match=r"IterableWrapper\(\["):
        list(IterableWrapper("train.tar").list_shards())


def test_list_shards_searches_other_file_systems_when_options_are_given(tmp_path: Path) -> None:
    """Globs go to fsspec, with the options of their protocol, which no exception or pickle prints."""
    import fsspec

    memory = fsspec.filesystem("memory")
    for number in range(2):
        memory.pipe(f"/bucket/d-{number}.tar", b"")
    pipe = IterableWrapper(["memory://bucket/*.tar"]).list_shards(storage_options={"memory": {"token": "secret"}})
    assert [url.rpartition("/")[2] for url in pipe] == ["d-0.tar", "d-1.tar"]
    assert "secret" not in repr(vars(pipe))
    assert [url.rpartition("/")[2] for url in pickle.loads(pickle.dumps(pipe))] == ["d-0.tar", "d-1.tar"]


def test_list_shards_puts_in_variables_when_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch reads the environment anew."""
    pipe = IterableWrapper(["${split}-{0..1}.tar"]).list_shards()
    for split in ("train", "val"):
        monkeypatch.setenv("WDS_split", split)
        assert list(pipe) == [f"{split}-0.tar", f"{split}-1.tar"]
    monkeypatch.delenv("WDS_split")
    with pytest.raises(ShardListError, match="WDS_split, which is not set"):
        list(pipe)


def test_list_shards_looks_elsewhere_when_rules_say_so(tmp_path: Path) -> None:
    """Rules are checked by the constructor, kept in pickles, and shown masked."""
    write_text_shards(tmp_path / "b", (1, 1))
    rules = {"gs://": f"{tmp_path}/", "s3://": "pipe:curl -H 'Authorization: secret' "}
    pipe = IterableWrapper(["gs://b/"]).list_shards(rewrite=rules)
    assert list(pickle.loads(pickle.dumps(pipe))) == [f"gs://b/shard-{index:06d}.tar" for index in range(2)]
    assert "secret" not in repr(vars(pipe))
    with pytest.raises(ValueError, match="rewriting rule 'gs' has no '='"):
        IterableWrapper([]).list_shards(rewrite="gs")


def test_dataset_files_read_no_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger's file cannot send a variable to its server."""
    from torchdata_wds.format.dataset_files.entries import dataset_groups
    from torchdata_wds.format.dataset_files.reading import Origin, SpecPlace
    from torchdata_wds.storage import list_urls

    monkeypatch.setenv("WDS_token", "secret")
    place = SpecPlace(Origin.of_file("https://host/set.yaml", trusted=False))
    (group,) = dataset_groups({"dataset": [{"shards": "https://host/${token}.tar"}]}, place)
    assert [list(list_urls(entry.patterns)) for entry in group.entries] == [["https://host/${token}.tar"]]
