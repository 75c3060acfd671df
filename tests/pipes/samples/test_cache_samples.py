"""Samples kept by the first pass: served whole or not at all, by whoever reads them."""

import copy
import logging
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.graph_settings import apply_sharding

from tests.kits.processes import in_child, open_files
from tests.kits.resume_kit import resumed, row, run, samples, shards_in, stopped
from tests.kits.shards import write_text_shards
from tests.kits.torchdata import StatefulDataLoader
from torchdata_wds import (
    CacheError,
    DecodingError,
    EncodingError,
    UnsafeDataError,
    ignore_and_continue,
    ignore_and_stop,
    warn_and_continue,
)
from torchdata_wds.pipes.samples.cache_samples import part_name
from torchdata_wds.process_place import Place
from torchdata_wds.storage.cache.sample_file import begin_samples

SAMPLES = [{"__key__": f"k{number}", "__url__": "x.tar", "cls": number} for number in range(10)]


class Counting(IterDataPipe):
    """Gives samples, counts how many it was asked for, and fails after some if asked to."""

    def __init__(self, items: list[Any], fails_after: int | None = None) -> None:
        self.items = items
        self.fails_after = fails_after
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.items):
            if number == self.fails_after:
                raise RuntimeError("the source failed")
            self.given += 1
            yield item

    def __len__(self) -> int:
        return len(self.items)


class Unseedable(IterDataPipe):
    """Fails where it is to be seeded."""

    def set_seed(self, seed: int) -> None:
        raise RuntimeError(f"no seed such as {seed}")

    def __iter__(self) -> Iterator[Any]:
        yield from SAMPLES


class Thing:
    """A value without a form of its own."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A name in a folder that does not exist yet."""
    return tmp_path / "caches" / "cache.db"


def names_in(folder: Path) -> list[str]:
    return sorted(found.name for found in folder.iterdir()) if folder.exists() else []


# -------------------------------------------------------------------------------------------------- one pass and more
def test_later_passes_and_runs_ask_nothing_of_the_source(file: Path) -> None:
    """The first pass writes and passes on, all others read."""
    source = Counting(SAMPLES)
    pipe = source.cache_samples(file)
    assert [list(pipe) for _ in range(3)] == [SAMPLES] * 3
    assert source.given == 10
    assert list(IterableWrapper([]).cache_samples(str(file))) == SAMPLES
    assert names_in(file.parent) == ["cache.db"]


def test_samples_pass_as_they_come_in_the_first_pass(file: Path) -> None:
    """Nothing waits for the end, and what the consumer changes is not what is kept."""
    source = Counting(copy.deepcopy(SAMPLES))
    for number, sample in enumerate(source.cache_samples(file)):
        assert source.given == number + 1
        sample["cls"] = "changed"
    assert list(source.cache_samples(file)) == SAMPLES


def test_decoded_samples_are_equal_when_served(file: Path) -> None:
    """Arrays, tensors, images and tuples, as decoding and collating make them."""
    image = Image.new("RGB", (4, 3), "red")
    sample = ({"__key__": "a", "jpg": image}, torch.ones(2, dtype=torch.bfloat16), [np.arange(3.0)], "text", None)
    pipe = IterableWrapper([sample], deepcopy=False).cache_samples(file)
    for ((fields, tensor, arrays, *rest),) in (list(pipe), list(pipe)):
        assert fields == {"__key__": "a", "jpg": image}
        assert torch.equal(tensor, sample[1])
        assert (arrays[0] == np.arange(3.0)).all()
        assert rest == ["text", None]


@pytest.mark.parametrize("taken", [0, 1, 9, 10])
def test_a_pass_that_is_left_early_leaves_no_file(taken: int, file: Path) -> None:
    """Also one that took all samples and did not ask for the end; the next pass begins anew."""
    source = Counting(SAMPLES)
    iterator = iter(source.cache_samples(file))
    assert list(islice(iterator, taken)) == SAMPLES[:taken]
    del iterator
    assert names_in(file.parent) == []
    before = open_files()
    assert list(source.cache_samples(file)) == SAMPLES
    assert open_files() <= before
    assert names_in(file.parent) == ["cache.db"]


def test_a_pass_may_go_on_in_another_thread(file: Path) -> None:
    """As a prefetcher's, which ends where the program does: while it writes and while it reads."""
    for _ in range(2):
        iterator = iter(Counting(SAMPLES).cache_samples(file))
        found = [next(iterator)]
        thread = threading.Thread(target=found.extend, args=(iterator,))
        thread.start()
        thread.join()
        assert found == SAMPLES
        assert names_in(file.parent) == ["cache.db"]


def test_a_pass_that_fails_leaves_no_file(file: Path) -> None:
    """An exception of the source is no end."""
    with pytest.raises(RuntimeError, match="the source failed"):
        list(Counting(SAMPLES, fails_after=7).cache_samples(file))
    assert names_in(file.parent) == []
    assert list(Counting(SAMPLES).cache_samples(file)) == SAMPLES


def test_no_file_turns_the_stage_off() -> None:
    """Everything passes, whatever it is and however much."""
    things = [Thing(), Thing()]
    assert list(IterableWrapper(things, deepcopy=False).cache_samples(None, max_samples=1)) == things
    assert len(IterableWrapper(things).cache_samples(None, max_samples=1)) == 2


def test_an_empty_pass_leaves_no_file(file: Path) -> None:
    """A cache of nothing would serve nothing for ever."""
    assert list(Counting([]).cache_samples(file)) == []
    assert list(Counting(SAMPLES).cache_samples(file)) == SAMPLES


def test_a_shuffle_behind_gives_new_orders(file: Path) -> None:
    """The order of the file is frozen, that behind it is not."""
    torch.manual_seed(0)
    pipe = IterableWrapper(SAMPLES).cache_samples(file).wds_shuffle(10)
    orders = [[sample["cls"] for sample in pipe] for _ in range(3)]
    assert [sorted(order) for order in orders] == [list(range(10))] * 3
    assert orders[0] != orders[1] != orders[2]


# -------------------------------------------------------------------------------------------------------- max_samples
def test_max_samples_gives_so_many_in_each_epoch(file: Path) -> None:
    """All epochs are alike, and the source is asked for no more."""
    source = Counting(SAMPLES)
    pipe = source.cache_samples(file, max_samples=4)
    assert [list(pipe), list(pipe)] == [SAMPLES[:4]] * 2
    assert source.given == 4


def test_max_samples_is_complete_when_so_many_are_taken(file: Path) -> None:
    """Whoever takes them and asks for no more has a file."""
    assert list(islice(Counting(SAMPLES).cache_samples(file, max_samples=4), 4)) == SAMPLES[:4]
    assert list(Counting([]).cache_samples(file, max_samples=4)) == SAMPLES[:4]


def test_max_samples_over_the_number_of_samples_gives_all(file: Path) -> None:
    """The file is that of the whole source, and serves any number."""
    assert list(Counting(SAMPLES).cache_samples(file, max_samples=11)) == SAMPLES
    for wanted in (None, 3, 11, 100):
        assert list(Counting([]).cache_samples(file, max_samples=wanted)) == SAMPLES[:wanted]


def test_a_file_with_fewer_samples_than_wanted_is_an_error(file: Path) -> None:
    """It never stands for more than it has."""
    list(Counting(SAMPLES).cache_samples(file, max_samples=4))
    assert list(Counting([]).cache_samples(file, max_samples=3)) == SAMPLES[:3]
    for wanted, word in ((None, "all"), (5, "5")):
        with pytest.raises(CacheError, match=rf"only the first 4 samples, and {word} are wanted.*max_samples=4"):
            list(Counting(SAMPLES).cache_samples(file, max_samples=wanted))


# ------------------------------------------------------------------------------------------------ values and handlers
def test_a_value_without_a_form_is_an_error_that_says_where(file: Path) -> None:
    """Key, place, type and option are named."""
    sample = {"__key__": "k", "json": [1, Thing()]}
    with pytest.raises(
        EncodingError, match=r"sample 'k': its item at \['json'\]\[1\] is .*Thing.*allow_pickle"
    ) as caught:
        list(IterableWrapper([SAMPLES[0], sample], deepcopy=False).cache_samples(file))
    assert caught.value.key == "k"
    assert names_in(file.parent) == []


def test_a_handler_skips_samples_that_have_no_form(file: Path) -> None:
    """They are in no epoch, and counted."""
    pipe = IterableWrapper([Thing(), *SAMPLES, Thing()], deepcopy=False).cache_samples(
        file, handler=ignore_and_continue
    )
    assert [list(pipe), list(pipe)] == [SAMPLES] * 2
    assert pipe.skipped == {"EncodingError": 2}


def test_a_handler_that_stops_leaves_no_file(file: Path) -> None:
    """What it cut off is not complete."""
    pipe = IterableWrapper([*SAMPLES, Thing(), *SAMPLES], deepcopy=False).cache_samples(file, handler=ignore_and_stop)
    assert list(pipe) == SAMPLES
    assert names_in(file.parent) == []


def test_pickled_values_need_permission_in_every_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is unpickled without it, nor under WDS_SECURE=1, whatever the handler."""
    source = IterableWrapper([{"__key__": "a", "thing": Thing}, {"__key__": "b"}])
    assert list(source.cache_samples(file, allow_pickle=True)) == list(source)
    assert list(source.cache_samples(file, allow_pickle=True)) == list(source)
    with pytest.raises(UnsafeDataError, match=r"cache.db holds pickles.*allow_pickle=True was not given"):
        list(source.cache_samples(file, handler=ignore_and_continue))
    monkeypatch.setenv("WDS_SECURE", "1")
    with pytest.raises(UnsafeDataError, match=r"cache.db holds pickles.*WDS_SECURE=1 refuses them"):
        list(source.cache_samples(file, allow_pickle=True, handler=ignore_and_continue))
    with pytest.raises(UnsafeDataError, match=r"sample 'a'.*WDS_SECURE=1"):
        list(source.cache_samples(file.with_name("other.db"), allow_pickle=True))


def test_a_file_without_pickles_needs_no_permission(file: Path) -> None:
    """The option alone changes nothing."""
    assert list(IterableWrapper(SAMPLES).cache_samples(file, allow_pickle=True)) == SAMPLES
    assert list(IterableWrapper([]).cache_samples(file)) == SAMPLES


def test_a_sample_that_cannot_be_read_back_goes_to_the_handler(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that is gone: an error with the number of the sample."""
    module = types.ModuleType("gone_tomorrow")
    exec("class Gone: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "gone_tomorrow", module)
    list(IterableWrapper([1, module.Gone(), 3], deepcopy=False).cache_samples(file, allow_pickle=True))
    monkeypatch.delattr(module, "Gone")
    with pytest.raises(DecodingError, match=r"sample 1 of .*cache.db cannot be read back.*'Gone'"):
        list(IterableWrapper([]).cache_samples(file, allow_pickle=True))
    pipe = IterableWrapper([]).cache_samples(file, allow_pickle=True, handler=ignore_and_continue)
    assert list(pipe) == [1, 3]
    assert pipe.skipped == {"DecodingError": 1}
    assert list(IterableWrapper([]).cache_samples(file, allow_pickle=True, handler=ignore_and_stop)) == [1]


def test_a_sample_larger_than_sqlite_holds_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and the limit are named."""
    monkeypatch.setattr("torchdata_wds.storage.cache.sample_file._ROW_OVERHEAD", 10**9 - 1000)
    with pytest.raises(EncodingError, match=r"'a': it takes 5,\d+ bytes, and SQLite holds 1,000 at most"):
        list(IterableWrapper([{"__key__": "a", "data": bytes(5000)}]).cache_samples(file))


# ------------------------------------------------------------------------------------------------- files that are not
def test_foreign_and_damaged_files_are_errors_whatever_the_handler(file: Path) -> None:
    """They are left as they are, and the cure is named."""
    file.parent.mkdir()
    file.write_text("a list of things")
    with pytest.raises(CacheError, match=r"cache.db cannot be used.*choose another file"):
        list(Counting(SAMPLES).cache_samples(file, handler=ignore_and_continue))
    assert file.read_text() == "a list of things"
    file.unlink()
    list(Counting([{"__key__": "a", "data": random.Random(1).randbytes(100_000)}]).cache_samples(file))
    data = bytearray(file.read_bytes())
    data[-50_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CacheError, match=r"cache.db is damaged: sample 0 .*Delete it"):
        list(Counting(SAMPLES).cache_samples(file, handler=ignore_and_continue))
    file.unlink()
    assert list(Counting(SAMPLES).cache_samples(file)) == SAMPLES


def test_samples_pass_through_while_another_process_writes(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits, nothing is lost, and the file is the writer's."""
    writer = begin_samples(file.absolute())
    assert writer is not None
    with caplog.at_level(logging.WARNING):
        assert list(Counting(SAMPLES).cache_samples(file)) == SAMPLES
        assert list(Counting(SAMPLES).cache_samples(file, max_samples=3)) == SAMPLES[:3]
    assert caplog.text.count("is being written by another process") == 1
    writer.abort()
    source = Counting(SAMPLES)
    assert [list(source.cache_samples(file)), list(source.cache_samples(file))] == [SAMPLES] * 2
    assert source.given == 10


def test_a_file_that_was_finished_meanwhile_is_served(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look for the file and the lock of its part another process may have finished it."""
    list(Counting(SAMPLES).cache_samples(file))
    away = file.rename(file.with_name("away.db"))

    def late(path: Path) -> Any:
        away.rename(path)
        return begin_samples(path)

    monkeypatch.setattr("torchdata_wds.storage.cache.sample_file.begin_samples", late)
    assert list(Counting(SAMPLES[:1]).cache_samples(file)) == SAMPLES
    assert names_in(file.parent) == ["cache.db"]


def test_a_pass_that_fails_before_its_first_sample_keeps_no_lock(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign file that appears meanwhile, and a source that cannot be seeded."""
    pipe = Unseedable().cache_samples(file)
    with pytest.raises(RuntimeError, match="no seed"):
        list(pipe)

    def late(path: Path) -> Any:
        writer = begin_samples(path)
        path.write_text("foreign")
        return writer

    with monkeypatch.context() as patch:
        patch.setattr("torchdata_wds.storage.cache.sample_file.begin_samples", late)
        with pytest.raises(CacheError, match="cannot be used"):
            list(Counting(SAMPLES).cache_samples(file))
    assert names_in(file.parent) == ["cache.db"]
    file.unlink()
    list(Counting(SAMPLES).cache_samples(file))
    assert list(Counting([]).cache_samples(file)) == SAMPLES


def test_a_full_disk_costs_the_file_and_no_sample(file: Path) -> None:
    """The pass goes on with a warning."""
    big = [{"__key__": str(number), "data": os.urandom(1 << 20)} for number in range(12)]

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000))
        assert [sample["__key__"] for sample in Counting(big).cache_samples(file)] == [str(n) for n in range(12)]
        assert names_in(file.parent) == []

    assert in_child(fill) == 0


def test_the_file_is_not_kept_when_a_shard_could_not_be_opened(file: Path, tmp_path: Path) -> None:
    """Its samples would be missing for ever; the next pass may have them."""
    urls = write_text_shards(tmp_path, [3, 3])
    hidden = Path(urls[1]).rename(tmp_path / "hidden")
    pipe = IterableWrapper(urls).load_wds_shards(handler=ignore_and_continue).group_by_key().cache_samples(file)
    assert len(list(pipe)) == 3
    assert names_in(file.parent) == []
    hidden.rename(urls[1])
    assert len(list(pipe)) == 6
    assert names_in(file.parent) == ["cache.db"]


@pytest.mark.parametrize(("handler", "kept"), [(ignore_and_stop, False), (ignore_and_continue, True)])
def test_the_file_is_kept_without_damaged_shards_unless_the_stream_was_ended(
    handler: Any, kept: bool, file: Path, tmp_path: Path
) -> None:
    """Damage stays damage; but what a handler has cut off is not complete."""
    urls = write_text_shards(tmp_path, [3, 3, 3])
    Path(urls[1]).write_bytes(Path(urls[1]).read_bytes()[:3000])
    pipe = IterableWrapper(urls).load_wds_shards(handler=handler).group_by_key().cache_samples(file)
    found = [sample["__key__"] for sample in pipe]
    assert ("s2-00002" in found) == kept
    assert names_in(file.parent) == (["cache.db"] if kept else [])


# ----------------------------------------------------------------------------------------------- options and lengths
def test_the_length_is_that_of_the_file_or_of_the_source(file: Path) -> None:
    """Before and after the first pass, with and without a limit."""
    pipe = Counting(SAMPLES).cache_samples(file)
    assert len(pipe) == 10
    assert len(Counting(SAMPLES).cache_samples(file, max_samples=4)) == 4
    list(pipe)
    assert len(Counting([]).cache_samples(file)) == 10
    assert len(Counting([]).cache_samples(file, max_samples=4)) == 4
    with pytest.raises(TypeError):
        len(IterableWrapper(iter([])).cache_samples(file.with_name("other.db")))
    with pytest.raises(TypeError, match="may skip"):
        len(Counting(SAMPLES).cache_samples(file.with_name("other.db"), handler=warn_and_continue))
    file.write_text("no cache")
    with pytest.raises(TypeError, match="cannot be used"):
        len(Counting(SAMPLES).cache_samples(file))


def test_a_copy_made_while_writing_begins_anew(file: Path) -> None:
    """A pickled pipe holds neither file nor lock."""
    pipe = Counting(SAMPLES).cache_samples(file)
    iterator = iter(pipe)
    next(iterator)
    twin = pickle.loads(pickle.dumps(pipe))
    assert list(twin) == SAMPLES
    assert list(iterator) == SAMPLES[1:]
    assert list(twin) == SAMPLES
    assert twin.source_datapipe.given == 11


# ---------------------------------------------------------------------------------------------------- many consumers
def consumer(pipe: IterDataPipe[Any], consumers: int, number: int, seed: int) -> IterDataPipe[Any]:
    """A copy of a pipe as a worker has it."""
    own = copy.deepcopy(pipe)
    apply_sharding(own, consumers, number)
    torch.utils.data.graph_settings.apply_random_seed(own, torch.Generator().manual_seed(seed))
    return own


def merged(parts: list[list[int]]) -> list[int]:
    return sorted(item for part in parts for item in part)


def shuffled_pipe(file: Path, count: int = 12, **options: Any) -> IterDataPipe[Any]:
    return IterableWrapper(range(count)).shuffle().sharding_filter().cache_samples(file, **options)


def test_consumers_keep_parts_of_their_own(file: Path) -> None:
    """Each its samples, in the same folder; another number of consumers does not use them."""
    pipe = shuffled_pipe(file)
    parts = [list(consumer(pipe, 3, number, 1)) for number in range(3)]
    assert merged(parts) == list(range(12))
    assert names_in(file.parent) == [f"cache-0000{number}-of-00003.db" for number in range(3)]
    assert [list(consumer(pipe, 3, number, 2)) for number in range(3)] == parts
    again = [list(consumer(pipe, 2, number, 1)) for number in range(2)]
    assert merged(again) == list(range(12))
    assert list(consumer(pipe, 1, 0, 1)) != []
    assert len(names_in(file.parent)) == 6


def test_parts_of_different_passes_fit_together(file: Path) -> None:
    """Consumers that finished in one run and those that must read again in another lose and double nothing."""
    pipe = shuffled_pipe(file)
    for seed in range(3):
        parts = [list(consumer(pipe, 3, number, seed)) for number in range(3)]
        assert merged(parts) == list(range(12))
        (file.parent / f"cache-0000{seed % 3}-of-00003.db").unlink()
    writer = begin_samples(part_name(file, Place(3, seed % 3)))
    assert writer is not None
    parts = [list(consumer(pipe, 3, number, 77)) for number in range(3)]
    assert merged(parts) == list(range(12))
    writer.abort()


@pytest.mark.parametrize("consumers", [1, 2])
def test_the_order_of_a_pass_that_writes_follows_from_no_seed(consumers: int, file: Path) -> None:
    """An epoch that is resumed without its file reads the same again; shuffles below the filter differ by consumer."""
    pipe = IterableWrapper(range(40)).shuffle().sharding_filter().wds_shuffle(30).cache_samples(file)
    found = set()
    for seed in range(2):
        found.add(tuple(tuple(consumer(pipe, consumers, number, seed)) for number in range(consumers)))
        for name in names_in(file.parent):
            (file.parent / name).unlink()
    assert len(found) == 1
    orders = found.pop()
    assert sorted(item for order in orders for item in order) == list(range(40))
    assert list(orders[0]) != sorted(orders[0])


def test_a_source_without_end_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its file would grow for ever; with a limit there is one."""
    drawn = IterableWrapper(["a", "b"]).resample_shards()
    with caplog.at_level(logging.WARNING):
        assert len(list(drawn.cache_samples(file, max_samples=5))) == 5
        assert len(list(islice(drawn.cache_samples(file.with_name("other.db")), 5))) == 5
    assert [record.getMessage() for record in caplog.records if "grows until the disk is full" in record.getMessage()]
    assert "cache.db" not in caplog.text
    assert names_in(file.parent) == ["cache.db"]


def test_files_of_another_division_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a filter each rank keeps everything: such files would double it once there is one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert list(IterableWrapper(range(12)).cache_samples(file)) == list(range(12))
    assert list(IterableWrapper(range(12)).cache_samples(file)) == list(range(12))
    with pytest.raises(CacheError, match=r"one of 1 that share.*divide the work among 2.*delete it"):
        list(consumer(shuffled_pipe(file), 2, 1, 0))


def test_max_samples_counts_for_each_consumer(file: Path) -> None:
    """Each gives so many."""
    pipe = shuffled_pipe(file, max_samples=3)
    for _ in range(2):
        parts = [list(consumer(pipe, 2, number, 1)) for number in range(2)]
        assert [len(part) for part in parts] == [3, 3]
        assert not set(parts[0]) & set(parts[1])


def test_ranks_have_parts_of_their_own(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.distributed or a launcher's variables, with and without workers, with and without a filter."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    list(Counting(SAMPLES).cache_samples(file))
    assert names_in(file.parent) == ["cache-00001-of-00002.db"]
    list(consumer(shuffled_pipe(file), 4, 1, 0))
    assert "cache-00005-of-00008.db" in names_in(file.parent)


@pytest.mark.parametrize(
    ("above", "reason"),
    [
        (lambda pipe: pipe.wds_epoch(4), r"after EpochCounter, whose stream continues"),
        (lambda pipe: pipe.wds_epoch(4).map(str), r"after EpochCounter, whose stream continues"),
        (lambda pipe: pipe.join_workers(), r"after JoinWorkers, in the main process.*put it before"),
        (lambda pipe: pipe.join_workers().map(str), r"after JoinWorkers, in the main process.*put it before"),
        (lambda pipe: pipe.fullsync(), r"after FullSync, in the main process.*put it before"),
    ],
)
def test_stages_whose_passes_differ_or_fail_unseen_are_refused_above(above: Any, reason: str, file: Path) -> None:
    """The constructor refuses them, unless it is turned off."""
    pipe = above(IterableWrapper(range(8)).sharding_filter())
    with pytest.raises(ValueError, match=reason):
        pipe.cache_samples(file)
    assert pipe.cache_samples(None).file is None


def keys_of(loader: Any) -> list[str]:
    return sorted(sample["__key__"] for sample in loader)


def shards_pipe(urls: list[str], file: Path) -> IterDataPipe[Any]:
    pipe = IterableWrapper(urls).shuffle().sharding_filter().load_wds_shards().group_by_key()
    return pipe.wds_decode().cache_samples(file)


def test_forked_workers_serve_their_parts(file: Path, tmp_path: Path) -> None:
    """Under torch's DataLoader, also when the shards are gone."""
    urls = write_text_shards(tmp_path / "shards", [3, 4, 0, 5, 1])
    loader = DataLoader(shards_pipe(urls, file), batch_size=None, num_workers=2)
    first = keys_of(loader)
    assert len(first) == 13
    assert len(set(first)) == 13
    assert names_in(file.parent) == ["cache-00000-of-00002.db", "cache-00001-of-00002.db"]
    for url in urls:
        Path(url).unlink()
    assert keys_of(loader) == first


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_of_a_reading_service_serve_their_parts(context: str, file: Path, tmp_path: Path) -> None:
    """Under DataLoader2, with another number of workers too."""
    from tests.kits.workers_kit import loader_of, time_limit

    urls = write_text_shards(tmp_path / "shards", [3, 4, 2, 5, 1])
    numbers = (2, 3) if context == "fork" else (2, 1)
    with time_limit(100):
        for workers in numbers:
            loader = loader_of(shards_pipe(urls, file), workers, multiprocessing_context=context)
            epochs = [keys_of(loader) for _ in range(3)]
            loader.shutdown()
            assert Counter(map(len, map(set, epochs))) == {15: 3}
            assert epochs[0] == epochs[1] == epochs[2]
    assert len(names_in(file.parent)) == sum(numbers)


@pytest.mark.parametrize(
    ("file_is", "epoch", "workers"),
    [
        ("gone", 1, 0),
        ("another run's", 0, 0),
        *(
            pytest.param(file_is, epoch, workers, marks=pytest.mark.slow)
            for workers in (0, 2)
            for file_is in ("kept", "gone", "another run's")
            for epoch in (0, 1)
        ),
    ],
)
def test_a_resumed_epoch_gives_the_rest_whatever_became_of_the_file(
    file_is: str, epoch: int, workers: int, file: Path, tmp_path: Path
) -> None:
    """Stopped in a pass that writes and in one that is served; a new machine has no file, or that of another run."""
    urls = shards_in(tmp_path)

    def pipe() -> IterDataPipe[Any]:
        return samples(urls).wds_shuffle(7).map(row).cache_samples(file)

    epochs = run(pipe(), workers, 2)
    shutil.rmtree(file.parent)
    state = stopped(pipe(), workers, epoch, 11)
    if file_is != "kept":
        shutil.rmtree(file.parent)
    if file_is == "another run's":
        run(pipe(), workers, 1, seed=77)
    assert resumed(state, workers, 2) == [epochs[epoch][11:], epochs[1]]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_gives_what_was_left(workers: int, file: Path, tmp_path: Path) -> None:
    """A state of the first epoch and one of a served epoch, restored in new loaders."""
    from tests.kits.workers_kit import time_limit
    from torchdata_wds import StatefulPipeline

    urls = write_text_shards(tmp_path / "shards", [3, 4, 2, 5, 1])

    def loader() -> Any:
        return StatefulDataLoader(
            StatefulPipeline(shards_pipe(urls, file), seed=3), batch_size=None, num_workers=workers
        )

    with time_limit(100):
        running = loader()
        for epoch in range(2):
            iterator = iter(running)
            taken = [next(iterator)["__key__"] for _ in range(6)]
            state = running.state_dict()
            rest = [sample["__key__"] for sample in iterator]
            assert len(set(taken + rest)) == 15, epoch
            resumed = loader()
            resumed.load_state_dict(state)
            assert [sample["__key__"] for sample in resumed] == rest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_killed_runs_with_workers_lose_and_double_nothing(file: Path, tmp_path: Path) -> None:
    """Whole runs of workers are killed at any moment; each next one gives every sample once."""
    urls = write_text_shards(tmp_path / "shards", [40] * 7)
    rng = random.Random("kills")
    for seed in range(12):
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                torch.manual_seed(seed)
                for _ in DataLoader(shards_pipe(urls, file), batch_size=None, num_workers=3):
                    time.sleep(0.0005)
            finally:
                os._exit(0)
        time.sleep(0.15 + rng.random() * 0.4)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        torch.manual_seed(100 + seed)
        if seed % 3 == 2:
            keys = keys_of(DataLoader(shards_pipe(urls, file), batch_size=None, num_workers=3))
            assert len(keys) == len(set(keys)) == 280
            rng.choice(list(file.parent.iterdir())).unlink()
