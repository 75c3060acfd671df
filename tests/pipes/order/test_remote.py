"""A global order over shards on a web server that fails, and what is left of it when it is given up."""

import gc
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.fault_server import Fault, Site, serve_site
from tests.kits.order_kit import SEED, Shards, key_of, shards_in
from torchdata_wds import IndexedShards, WdsLoader
from torchdata_wds.errors import ChangedShardError
from torchdata_wds.pipes.order import reading

Remote = tuple[Site, str, Shards]


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    shards = shards_in(tmp_path, (9, 30, 1, 14))
    site = Site({f"/{Path(url).name}": Path(url).read_bytes() for url in shards.urls})
    with serve_site(site) as base:
        yield site, base, shards


def ordered(remote: Remote, **options: Any) -> Any:
    site, base, shards = remote
    source = IterableWrapper([base + path for path in site.objects])
    return source.load_in_order(run=4, seed=SEED, **{"index": shards.index, **options}).map(key_of)


def piece_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("wds-pieces")]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("kind", "read_ahead"), [("drop", 0), ("reset", 8), ("silent", 8), ("status", 0)])
def test_samples_come_in_order_when_requests_fail(remote: Remote, kind: str, read_ahead: int) -> None:
    site, _, shards = remote
    fault = Fault(kind, after=300, wait="0")
    site.plans = {path: itertools.cycle([fault, None, None]) for path in site.objects}
    with WdsLoader(ordered(remote, read_ahead=read_ahead)) as loader:
        assert list(loader) == shards.order(run=4)
    assert not piece_threads()


def press_when_stalled(site: Site, times: int) -> threading.Thread:
    """Presses Ctrl-C when this many requests have stalled."""

    def press() -> None:
        wait_until(lambda: site.stalled >= times)
        # Not to the main thread, whose wait the signal would interrupt, unless it came right before the wait.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    site.plans = {path: itertools.repeat(Fault("stall", after=100)) for path in site.objects}
    presser = threading.Thread(target=press)
    presser.start()
    return presser


def test_early_break_ends_requests_when_the_server_stalls(remote: Remote) -> None:
    """It waited for them: a minute for each, and eight more attempts. So did Ctrl-C and the end of the process."""
    site, _, _ = remote
    pipe = ordered(remote, read_ahead=8)
    # The versions of 4 shards and the first 9 pieces come; while the sixth piece is read, the fourteenth is asked for.
    plan = itertools.chain([None] * 13, itertools.repeat(Fault("stall", after=100)))
    site.plans = dict.fromkeys(site.objects, plan)
    iterator = iter(pipe)
    for _ in range(24):
        next(iterator)
    wait_until(lambda: site.stalled)
    start = time.monotonic()
    del iterator, pipe
    gc.collect()
    assert time.monotonic() - start < 8
    wait_until(lambda: not piece_threads())


def test_interrupt_ends_downloads_to_the_cache_when_the_server_stalls(remote: Remote, tmp_path: Path) -> None:
    site, _, shards = remote
    with WdsLoader(ordered(remote, read_ahead=8, cache=tmp_path / "cache")) as loader:
        presser = press_when_stalled(site, 2)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert time.monotonic() - start < 15
        presser.join()
        wait_until(lambda: not piece_threads())
        site.plans = {}
        loader.set_epoch(0)
        assert list(loader) == shards.order(run=4)


@pytest.mark.slow
def test_interrupt_ends_all_requests_of_a_batch_when_the_server_stalls(remote: Remote) -> None:
    site, base, shards = remote
    with IndexedShards([base + path for path in site.objects], index=shards.index) as data:
        assert data[0]["__key__"] == shards.keys[0]
        presser = press_when_stalled(site, 2)
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            data[[0, 12, 30, 45]]
        assert time.monotonic() - start < 15
        presser.join()
        wait_until(lambda: not piece_threads())
        site.plans = {}
        assert [sample["__key__"] for sample in data[[0, 12]]] == [shards.keys[0], shards.keys[12]]


@pytest.mark.parametrize("read_ahead", [0, 8])
def test_replaced_shard_is_an_error_and_new_to_another_pipe(remote: Remote, read_ahead: int) -> None:
    """The headers and keys of the new version are those of the old one: only the ETag tells them apart."""
    site, _, shards = remote
    pipe = ordered(remote, read_ahead=read_ahead, index="auto")
    iterator = iter(pipe)
    taken = [next(iterator) for _ in range(3)]
    path = list(site.objects)[1]
    changed = bytearray(site.objects[path])
    changed[512] ^= 1  # the first byte after a header
    site.objects[path] = bytes(changed)
    with pytest.raises(ChangedShardError, match="is not the version that its index describes: it has the ETag"):
        taken += iterator
    assert taken == shards.order(run=4)[: len(taken)]
    assert sorted(ordered(remote, read_ahead=read_ahead, index="auto")) == sorted(shards.keys)


@pytest.mark.slow
def test_states_pickles_and_errors_hold_no_secret(remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    site, base, shards = remote
    options = {"http": {"headers": {"Authorization": "Bearer s3cr3t"}}}
    urls = [f"{base}{path}?sig=s3cr3t" for path in site.objects]
    pipe = IterableWrapper(urls).load_in_order(run=4, storage_options=options)
    with caplog.at_level("DEBUG"), WdsLoader(pipe.map(key_of), seed=SEED) as loader:
        assert next(iter(loader)) == shards.order(run=4)[0]
        shown = [repr(loader.state_dict()), repr(pipe), str(pipe), caplog.text]
    site.objects.clear()
    with pytest.raises(Exception, match="404") as failure:
        list(pipe)
    assert not [text for text in [*shown, str(failure.value)] if "s3cr3t" in text]


def test_read_ahead_is_bounded_by_bytes_when_samples_are_large(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples of 500 MB each would not fit into memory."""
    site, _, shards = remote
    monkeypatch.setattr(reading, "LARGEST_REMOTE_PIECE", 512)  # a sample has 1,024 bytes, a run of 4 has 4,096
    iterator = iter(ordered(remote, read_ahead=8))
    taken = [next(iterator)]
    assert len(site.requests) <= 2
    assert taken + list(iterator) == shards.order(run=4)
