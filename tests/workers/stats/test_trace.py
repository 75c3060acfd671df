"""The trace of an epoch: a valid file, written once and whole, with a track for each worker and the training loop."""

import gc
import json
import logging
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.shards import tar_bytes, text_samples, write_text_shards
from tests.kits.torchdata import is_installed
from tests.kits.workers_kit import loader_of
from torchdata_wds import WdsLoader
from torchdata_wds.workers.stats.tracing.epoch_trace import EpochTrace, _with_rank
from torchdata_wds.workers.stats.tracing.events import trace_json
from torchdata_wds.workers.stats.tracing.spans import Span, SpanFile, SpanLog, joined, read_spans

SHARDS, ITEMS = 4, 12


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """No folder of a trace outlives it."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert not list(temporary.glob("wds-trace-*"))


def slow(sample: Any) -> Any:
    time.sleep(0.004)
    return sample


def chain(folder: Path) -> Any:
    paths = write_text_shards(folder / "data", [6] * SHARDS)
    return IterableWrapper(paths).sharding_filter().load_wds_shards().group_by_key().wds_map(slow).batch(2)


def check(path: Path) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Checks a file against the format; returns the numbers of the tracks, and the events without metadata."""
    whole = json.loads(path.read_text())
    assert set(whole) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = whole["traceEvents"]
    metadata = [event for event in events if event["ph"] == "M"]
    tracks = {event["args"]["name"]: event["tid"] for event in metadata if event["name"] == "thread_name"}
    assert len({event["pid"] for event in events}) == 1
    found = events[len(metadata) :]
    assert found == sorted(found, key=lambda event: event["ts"])
    ends: Counter[int] = Counter()
    for event in found:
        assert {"name", "cat", "ph", "ts", "pid", "tid"} <= set(event)
        assert isinstance(event["ts"], int)
        assert event["ts"] >= 0
        assert event["tid"] in tracks.values()
        if event["ph"] == "X":
            assert event["ts"] >= ends[event["tid"]]  # Perfetto shows spans that overlap wrongly
            assert event["dur"] > 0
            ends[event["tid"]] = event["ts"] + event["dur"]
        else:
            assert (event["ph"], event["s"]) == ("i", "t")
    return tracks, found


def counts(events: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    return Counter((event["tid"], event["name"]) for event in events)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_epoch_is_traced(tmp_path: Path, workers: int) -> None:
    """Waits and openings are exact, the stage that takes the time is seen, and the file stays as it is."""
    path = tmp_path / "epoch.json"
    loader = WdsLoader(chain(tmp_path), num_workers=workers, trace=path)
    for _ in loader:
        assert not path.exists()
        time.sleep(0.002)
    tracks, events = check(path)
    makers = [f"worker {number}" for number in range(workers)] or ["stages in the main process"]
    assert list(tracks) == ["training loop", *makers]
    found = counts(events)
    assert found[0, "training step"] == ITEMS
    assert found[0, "next(loader)"] in (ITEMS, ITEMS + 1)  # the wait for the end may take less than a microsecond
    for maker in makers:
        number = tracks[maker]
        assert found[number, "opened a shard"] == SHARDS // len(makers)
        busy = sum(event.get("dur", 0) for event in events if event["tid"] == number and "slow" in event["name"])
        assert busy > 20_000
    before = path.read_bytes()
    assert len(list(loader)) == ITEMS
    loader.load_state_dict(loader.state_dict())
    assert len(list(loader)) == ITEMS
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_slow_source_is_seen_without_its_secrets(tmp_path: Path, workers: int) -> None:
    """With the shard and the byte at which it was waited for."""
    path, data = tmp_path / "epoch.json", tar_bytes(text_samples("s", 9))
    site = Site({"/x.tar": data, "/y.tar": data})
    site.plans = {name: iter([Fault("late", seconds=0.15)]) for name in site.objects}
    with serve_site(site) as address:
        secret = address.replace("//", "//me:hidden@")
        urls = [f"{secret}{name}?token=hidden" for name in site.objects]
        pipe = IterableWrapper(urls).sharding_filter().load_wds_shards().group_by_key()
        assert len(list(WdsLoader(pipe, num_workers=workers, trace=path))) == 18
    assert "hidden" not in path.read_text()
    waits = [event for event in check(path)[1] if event["name"] == "waiting for the source"]
    assert len({event["tid"] for event in waits}) == max(workers, 1)
    assert sum(event["dur"] for event in waits) > 150_000
    assert "/x.tar?token=***, byte 0" in waits[0]["args"]["detail"] + waits[1]["args"]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_both_fronts_and_spawned_workers_are_traced(tmp_path: Path, workers: int) -> None:
    """A reading service is copied by DataLoader2, and the copy writes the trace."""
    fronts = [("loader", "spawn"), *([("service", "fork")] if is_installed() else [])]
    for front, context in fronts:
        path = tmp_path / f"{front}.json"
        options = {"multiprocessing_context": context} if workers else {}
        with loader_of(chain(tmp_path), workers, front=front, trace=path, **options) as loader:
            assert len(list(loader)) == ITEMS
            tracks, events = check(path)
        assert len(tracks) == 1 + max(workers, 1)
        assert sum(event["name"] == "opened a shard" for event in events) == SHARDS


def test_an_epoch_that_is_left_is_written(tmp_path: Path) -> None:
    """By the next epoch, and when the loader is dropped."""
    path = tmp_path / "epoch.json"
    loader = WdsLoader(chain(tmp_path), trace=path)
    next(iter(loader))
    assert not path.exists()
    next(iter(loader))
    assert check(path)[1]
    path.unlink()
    loader = WdsLoader(chain(tmp_path), trace=str(path))
    next(iter(loader))
    del loader
    gc.collect()
    assert check(path)[1]


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on."""
    path = tmp_path / "epoch.json"
    loader = WdsLoader(chain(tmp_path), trace=path)
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        assert len(list(loader)) == ITEMS
    assert f"the trace of epoch 0 is not written to {path}" in caplog.text


def test_wrong_paths_raise_in_the_constructor(tmp_path: Path) -> None:
    """Before an epoch is spent on them."""
    for wrong in (3, "", True):
        with pytest.raises(TypeError, match="trace must be the path of a file"):
            WdsLoader(IterableWrapper([1]), trace=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no folder"):
        WdsLoader(IterableWrapper([1]), trace=tmp_path / "missing" / "epoch.json")


def test_a_stream_that_goes_on_is_traced_up_to_the_end_of_the_epoch(tmp_path: Path) -> None:
    """With wds_epoch in the main process, the workers run on; they notice that nobody reads what they note."""
    path = tmp_path / "epoch.json"
    pipe = chain(tmp_path).join_workers().wds_epoch(4)
    with WdsLoader(pipe, num_workers=1, trace=path) as loader:
        assert len(list(loader)) == 4
        before = path.read_bytes()
        assert len(list(loader)) == 4
    assert check(path)[0].keys() >= {"training loop", "worker 0"}
    assert path.read_bytes() == before


def test_ranks_write_files_of_their_own(tmp_path: Path) -> None:
    """One name for all would be written by the last."""
    assert _with_rank("a.b/epoch.json", 1) == "a.b/epoch-rank1.json"
    assert _with_rank("a.b/epoch", 0) == "a.b/epoch-rank0"
    trace = EpochTrace(tmp_path / "epoch.json")
    trace.open(0, rank=1, ranks=2)
    assert trace.begin(0)
    trace.end()
    assert json.loads((tmp_path / "epoch-rank1.json").read_text())["traceEvents"][0]["args"]["name"].endswith("1 of 2")


def test_spans_of_one_kind_become_one() -> None:
    """Unless there is a gap, and never over each other."""
    log = SpanLog(9)
    log.add("a", "stage", 1.0, 2.0, "first")
    log.add("a", "stage", 2.0, 3.0, "second")
    log.add("b", "stage", 2.5, 4.0)
    log.add("b", "stage", 3.0, 3.5)
    log.add("b", "stage", 5.0, 6.0)
    log.add("b", "stage", 6.0002, 6.49)
    log.block(6.5, 7.5)
    log.block(7.6, 7.6001)
    log.add("b", "stage", 7.5, 7.6, subject="another")
    log.add("b", "stage", 7.0, 8.0)
    assert [(span.name, span.start, span.end) for span in log.take()] == [
        ("a", 1.0, 3.0),
        ("b", 3.0, 4.0),
        ("b", 5.0, 6.5),
        ("blocked", 6.5, 7.5),
        ("b", 7.5, 7.6),
        ("b", 7.6, 8.0),
    ]


def test_a_span_that_goes_on_is_handed_over_in_pieces() -> None:
    """So that an epoch may be left in it; the pieces are one in the trace, but for a new shard."""
    log, pieces = SpanLog(99), []
    for number in range(8):
        log.add(
            "wait", "source", number * 0.2, (number + 1) * 0.2, f"byte {number}", subject="x" if number < 5 else "y"
        )
        pieces += log.take(is_end=False)
    pieces += log.take()
    assert len(pieces) > 3
    assert [(round(span.start, 6), round(span.end, 6), span.detail) for span in joined(pieces)] == [
        (0.0, 1.0, "byte 0"),
        (1.0, 1.6, "byte 5"),
    ]


def test_a_track_with_too_many_events_says_that_it_stops() -> None:
    """The last of its events is the note."""
    log = SpanLog(3)
    for number in range(9):
        log.add(str(number), "stage", number, number + 1)
    *spans, note = log.take()
    assert [span.name for span in spans] == ["0", "1", "2"]
    assert "stops here" in note.name


def test_spans_in_files_survive_the_end_of_their_process(tmp_path: Path) -> None:
    """Half a line, of a worker that was killed, is left out; without the folder, the trace is over."""
    span = Span("a", "stage", 1.0, 2.0, "näher")
    assert SpanFile(tmp_path, 3, os.getpid()).append([span])
    with next(tmp_path.glob("3-*.jsonl")).open("a") as file:
        file.write('["b", "sta')
    assert list(read_spans(tmp_path)) == [(3, span)]
    assert not SpanFile(tmp_path / "gone", 3, 1).append([span])


def test_events_begin_at_zero() -> None:
    """What began before the epoch is cut, and what ended before it is left out."""
    spans = [
        Span("old", "stage", 1.0, 1.0),
        Span("cut", "stage", 2.0, 1.5),
        Span("new", "source", 3.5, 0.5, "\udc80.tar"),
    ]
    events = json.loads(trace_json(7, "title", {0: ("track", spans)}, 3.0, {}))["traceEvents"][3:]
    assert [(event["name"], event["ts"], event["dur"]) for event in events] == [
        ("cut", 0, 500_000),
        ("new", 500_000, 500_000),
    ]
    assert events[1]["args"] == {"detail": "\udc80.tar"}  # a file name that is not valid text
