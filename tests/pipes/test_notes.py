"""An exception of a user's function says in which stage and at which sample it came, raised or skipped."""

import functools
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.shards import write_tar
from tests.kits.workers_kit import loader_of
from torchdata_wds import WdsError, warn_and_continue
from torchdata_wds.pipes.notes import Latest, note_failure


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """A shard of three samples, the second of which is the bad one."""
    members = [(f"{key}.{ext}", data) for key in ("good", "bad", "fine") for ext, data in (("cls", key), ("txt", "x"))]
    return str(write_tar(tmp_path / "x.tar", [(name, data.encode()) for name, data in members]))


def samples(shard: str) -> IterDataPipe:
    return IterableWrapper([shard]).sharding_filter().load_wds_shards().group_by_key().wds_decode(only="txt")


def is_bad(item: Any) -> bool:
    data = item["cls"] if isinstance(item, dict) else item
    return data == b"bad" or (type(data) is tuple and b"bad" in data)


def broken(item: Any) -> Any:
    return 1 // 0 if is_bad(item) else item


def broken_batch(batch: Any) -> Any:
    return [broken(sample) for sample in batch]


def broken_stage(items: Any) -> Iterator[Any]:
    for sample in items:
        yield broken(sample)


def as_tuple(sample: Any) -> tuple[Any, Any]:
    return sample["cls"], sample["txt"]


def broken_name(name: str) -> str:
    return str(1 // 0) if name == "bad.cls" else name


def broken_key(name: str) -> tuple[str, str]:
    key, _, field = broken_name(name).partition(".")
    return key, field


def same(item: Any) -> Any:
    return item


class Breaking(IterDataPipe):
    """A pipe of the user's."""

    def __init__(self, source_datapipe: IterDataPipe) -> None:
        self.source_datapipe = source_datapipe

    def __iter__(self) -> Iterator[Any]:
        for sample in self.source_datapipe:
            yield broken(sample)


AT_SAMPLE = "sample 'bad' of shard {shard}"

GRAPHS: dict[str, tuple[Callable[[str], Any], str]] = {
    "wds_map": (lambda shard: samples(shard).wds_map(broken), f"wds_map(broken) failed at {AT_SAMPLE}"),
    "partial": (
        lambda shard: samples(shard).wds_map(functools.partial(broken)),
        f"wds_map(partial(broken, ...)) failed at {AT_SAMPLE}",
    ),
    "wds_map_dict": (
        lambda shard: samples(shard).wds_map_dict(txt=same, cls=broken),
        f"wds_map_dict(cls=broken) failed at {AT_SAMPLE}",
    ),
    "wds_map_tuple": (
        lambda shard: samples(shard).wds_to_tuple("cls", "txt").wds_map_tuple(broken),
        f"wds_map_tuple(broken) failed at {AT_SAMPLE}",
    ),
    "tuple by wds_extract_keys": (
        lambda shard: samples(shard).wds_extract_keys("cls", "txt").map(same).wds_map(broken),
        f"wds_map(broken) failed at {AT_SAMPLE}",
    ),
    "tuple by wds_map": (
        lambda shard: samples(shard).wds_map(as_tuple).wds_map(same).wds_map(broken),
        f"wds_map(broken) failed at {AT_SAMPLE}",
    ),
    "native map": (lambda shard: samples(shard).map(broken).wds_map(same), f"map(broken) failed at {AT_SAMPLE}"),
    "wds_compose": (
        lambda shard: samples(shard).wds_compose(broken_stage),
        f"wds_compose(broken_stage) failed at {AT_SAMPLE}",
    ),
    "batch": (
        lambda shard: samples(shard).batch(2).wds_map(broken_batch),
        "wds_map(broken_batch) failed at a batch of 2 samples, sample 'good' of shard {shard} to " + AT_SAMPLE,
    ),
    "pipe of the user": (lambda shard: Breaking(samples(shard)).wds_map(same), f"Breaking() failed at {AT_SAMPLE}"),
    "rename": (
        lambda shard: IterableWrapper([shard]).load_wds_shards(rename=broken_name).group_by_key(),
        "load_wds_shards(rename=broken_name) failed at member 'bad.cls' of shard {shard}",
    ),
    "keys": (
        lambda shard: IterableWrapper([shard]).load_wds_shards().map(same).group_by_key(keys=broken_key),
        "group_by_key(keys=broken_key) failed at member 'bad.cls' of shard {shard}",
    ),
}


@pytest.mark.parametrize(("build", "note"), GRAPHS.values(), ids=GRAPHS)
def test_exception_names_stage_and_sample_when_a_function_raises(
    build: Callable[[str], Any], note: str, shard: str
) -> None:
    """Once, whatever stages it passes through."""
    with pytest.raises(ZeroDivisionError) as caught:
        list(build(shard).wds_map(same))
    assert caught.value.__notes__ == [note.format(shard=shard)]


@pytest.mark.parametrize("workers", [0, 1])
def test_exception_names_stage_and_sample_when_workers_run_the_graph(workers: int, shard: str) -> None:
    """Across the border of processes, and where a native stage is the last one."""
    with loader_of(samples(shard).map(broken), workers) as loader, pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    assert caught.value.__notes__ == [f"map(broken) failed at sample 'bad' of shard {shard}"]


@pytest.mark.parametrize("form", ["wds_map", "wds_map_dict", "wds_map_tuple"])
def test_log_names_stage_and_sample_when_it_is_skipped(form: str, shard: str, caplog: pytest.LogCaptureFixture) -> None:
    """The warning about a skipped item says where it was."""
    pipe = samples(shard).wds_to_tuple("cls", "txt") if form == "wds_map_tuple" else samples(shard)
    functions = ((), {"cls": broken}) if form == "wds_map_dict" else ((broken,), {})
    with caplog.at_level(logging.WARNING):
        assert len(list(getattr(pipe, form)(*functions[0], handler=warn_and_continue, **functions[1]))) == 2
    (record,) = caplog.records
    words = "division by zero" if sys.version_info >= (3, 14) else "integer division"
    assert f"failed at sample 'bad' of shard {shard}: {words}" in record.getMessage()
    assert f"{form}(" in record.getMessage()


def test_handler_sees_the_note_when_it_is_called(shard: str) -> None:
    """A handler of the user's can tell what it is about to skip."""
    seen = []

    def handler(error: Exception) -> bool:
        seen.extend(error.__notes__)
        return True

    list(samples(shard).wds_map(broken, handler=handler))
    assert seen == [f"wds_map(broken) failed at sample 'bad' of shard {shard}"]


def test_note_is_left_out_when_the_exception_names_its_place() -> None:
    """The package's own exceptions say where they came."""
    for error in (WdsError("x", key="a"), WdsError("x", shard="x.tar")):
        note_failure(error, IterableWrapper([1]).wds_map(same), {"__key__": "a"})
        assert not hasattr(error, "__notes__")


def test_note_masks_secrets_when_a_url_has_some() -> None:
    """Signed URLs do not reach a log through a note."""
    error = ValueError()
    note_failure(
        error, IterableWrapper([1]).wds_map(same), {"__key__": "a", "__url__": "https://h/x?X-Amz-Signature=s"}
    )
    assert error.__notes__ == ["wds_map(same) failed at sample 'a' of shard https://h/x?X-Amz-Signature=***"]


def test_note_names_the_class_when_an_object_cannot_be_shown() -> None:
    """Whatever a repr does, the exception stays what it was."""

    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

        def __call__(self, item: Any) -> Any:
            return item

    error = ValueError()
    note_failure(error, IterableWrapper([1]).wds_map(Shy()), 1)
    assert error.__notes__ == ["wds_map(<Shy>) failed"]


def test_latest_is_empty_when_it_is_copied() -> None:
    """A pipe that is pickled in the middle of an epoch takes no sample along."""
    latest = Latest()
    latest.sample = {"__key__": "a"}
    assert pickle.loads(pickle.dumps(latest)).sample is None
