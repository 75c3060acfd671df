"""A function of one sample at a time: what it gives is written, in order."""

from pathlib import Path
from typing import Any

import pytest

from tests.kits.shards import sample_members, text_keys, write_tar, write_text_shards
from tests.kits.tool_kit import read_samples
from torchdata_wds.cli.map import over_samples
from torchdata_wds.errors import SampleError, ShardFormatError


def test_over_samples_writes_what_the_function_gives(tmp_path: Path) -> None:
    """A sample, none, or several; values are encoded by their field."""
    (source,) = write_text_shards(tmp_path, (4,))

    def function(sample: dict[str, Any]) -> Any:
        assert sample["__url__"] == source
        number = int(sample["cls"])
        made = [{**sample, "__key__": f"{sample['__key__']}-{turn}", "json": {"turn": turn}} for turn in range(number)]
        return [None, sample, made, (one for one in made)][number]

    over_samples(function, source, str(tmp_path / "out.tar"))
    keys = text_keys((4,))
    assert [(sample["__key__"], sample["cls"], sample["json"]) for sample in read_samples(tmp_path / "out.tar")] == [
        (keys[1], b"1", b'{"number": 1}'),
        *((f"{keys[2]}-{turn}", b"2", b'{"turn":%d}' % turn) for turn in range(2)),
        *((f"{keys[3]}-{turn}", b"3", b'{"turn":%d}' % turn) for turn in range(3)),
    ]


@pytest.mark.parametrize("answer", [True, 1, "text", b"bytes", [1], [{"txt": b"no key"}], {"__key__": "a.b"}])
def test_over_samples_refuses_what_is_no_sample(answer: Any, tmp_path: Path) -> None:
    """The error says what is right, and there is no output."""
    source = write_tar(tmp_path / "x.tar", sample_members("a", txt=b""))
    with pytest.raises(SampleError):
        over_samples(lambda _: answer, source, str(tmp_path / "out.tar"))
    assert not (tmp_path / "out.tar").exists()


def test_over_samples_names_the_sample_of_a_wrong_answer(tmp_path: Path) -> None:
    """Also where the function has changed its key."""
    source = write_tar(tmp_path / "x.tar", sample_members("a", txt=b""))
    with pytest.raises(
        SampleError, match=r"has returned 'b' for sample 'a' of shard .*x\.tar: it must return a sample"
    ):
        over_samples(lambda sample: sample.update(__key__="b") or sample["__key__"], source, str(tmp_path / "out.tar"))


def test_over_samples_writes_nothing_when_the_shard_is_damaged(tmp_path: Path) -> None:
    """Half an output would pass for a whole one."""
    (source,) = write_text_shards(tmp_path, (4,))
    Path(source).write_bytes(Path(source).read_bytes()[:5000])
    with pytest.raises(ShardFormatError, match="is cut off"):
        over_samples(lambda sample: sample, source, str(tmp_path / "out.tar"))
    assert not (tmp_path / "out.tar").exists()
