"""load_wds_shards with read_ahead= and interleave=: the same samples, and the order that is promised."""

import itertools
import pickle
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds
from tests.kits.resume_kit import SMALL, augment, left_of, loader_of, resumed, row, run, shards_in, states_at
from tests.kits.servers import serve_folder
from tests.kits.shards import keys_of, tar_bytes, text_keys, text_samples, write_text_shards
from tests.kits.workers_kit import time_limit
from torchdata_wds import (
    ReappearingKeyError,
    ShardFormatError,
    ShardListError,
    ShardOpenError,
    ignore_and_continue,
    ignore_and_stop,
    index_shard,
)
from torchdata_wds.pipes.resume_facts import Facts, Wanted, Watch
from torchdata_wds.pipes.shards.shard_sources import ShardSource

WAYS = [{"read_ahead": 1}, {"read_ahead": 4}, {"read_ahead": 99}, {"read_ahead": 3, "interleave": 3}, {"interleave": 1}]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread is left behind, and no test hangs."""
    with time_limit(60):
        yield
    assert not [thread for thread in threading.enumerate() if thread.name == "shard read-ahead"]


def in_turn(shards: Sequence[Sequence[str]], width: int) -> list[str]:
    """The order of interleaving, told in another way: queues side by side, an ended one makes place for the next."""
    waiting = [list(shard) for shard in shards]
    open_, order, turn = [], [], 0
    while True:
        while turn == len(open_) < width and waiting:
            open_.append(waiting.pop(0))
            if open_[turn]:
                order.append(open_[turn].pop(0))
                turn += 1
            else:
                open_.pop()
        if not open_:
            return order
        turn = 0 if turn >= len(open_) else turn
        if open_[turn]:
            order.append(open_[turn].pop(0))
            turn += 1
        else:
            open_[turn : turn + 1] = [waiting.pop(0)] if waiting else []


@pytest.mark.parametrize("options", [way for way in WAYS if way.get("interleave", 1) == 1])
def test_samples_are_the_same_when_shards_are_read_ahead(options: dict[str, int], tmp_path: Path) -> None:
    """In the same order, from files, servers, commands, slices and compressed shards."""
    sizes = (5, 0, 3, 8, 1, 1, 6)
    urls = write_text_shards(tmp_path, sizes)
    for url in urls[::2]:
        index_shard(url)
    with serve_folder(tmp_path) as address:
        mixed = [*urls[:2], f"{address}/{Path(urls[2]).name}", f"pipe:cat {urls[3]}", *urls[4:]]
        pipe = IterableWrapper(mixed).load_wds_shards(**options)
        assert keys_of(pipe.group_by_key()) == text_keys(sizes)
        plain = [member[:3] for member in IterableWrapper(mixed).load_wds_shards()]
        assert [member[:3] for member in pipe] == plain
    slices = [torchdata_wds.ShardSlice(url, 1, 4, 2) for url in (urls[0], urls[3], urls[6])]
    wanted = keys_of(IterableWrapper(slices).load_wds_shards().group_by_key())
    assert keys_of(IterableWrapper(slices).load_wds_shards(**options).group_by_key()) == wanted
    assert len(wanted) == 6


@pytest.mark.parametrize("width", [2, 3, 7, 50])
@pytest.mark.parametrize("read_ahead", [0, 2])
def test_samples_come_in_turn_when_interleaved(width: int, read_ahead: int, tmp_path: Path) -> None:
    """One of each open shard; the next shard takes the place of one that has ended. Members come in whole samples."""
    sizes = (5, 0, 3, 8, 1, 0, 1, 6, 2)
    urls = write_text_shards(tmp_path, sizes)
    shards = [[key for key in text_keys(sizes) if key.startswith(f"s{number}-")] for number in range(len(sizes))]
    loader = IterableWrapper(urls).load_wds_shards(interleave=width, read_ahead=read_ahead)
    expected = in_turn(shards, width)
    assert keys_of(loader.group_by_key()) == expected
    assert keys_of(loader.group_by_key()) == expected
    members = [member.name.partition(".")[0] for member in loader]
    assert members == [key for key in expected for _ in range(3)]
    assert expected[:2] == ["s0-00000", "s2-00000"]


def test_interleaved_samples_are_those_of_all_shards(tmp_path: Path) -> None:
    """For random sizes and widths."""
    rng = random.Random(3)
    for number in range(15):
        sizes = [rng.choice((0, 1, 2, 5, 9)) for _ in range(rng.randrange(1, 9))]
        urls = write_text_shards(tmp_path / str(number), sizes)
        loader = IterableWrapper(urls).load_wds_shards(interleave=rng.randrange(1, 6), read_ahead=rng.randrange(3))
        assert sorted(keys_of(loader.group_by_key())) == text_keys(sizes)


def test_next_shards_are_opened_while_the_first_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many as were asked for, and no more."""
    urls = write_text_shards(tmp_path, (2,) * 6)
    opened: set[str] = set()
    changed = threading.Condition()
    inner = ShardSource.open

    def noted(source: ShardSource, *rules: Any) -> Any:
        with changed:
            opened.add(source.part.url)
            changed.notify_all()
        return inner(source, *rules)

    monkeypatch.setattr(ShardSource, "open", noted)
    samples = iter(IterableWrapper(urls).load_wds_shards(read_ahead=3).group_by_key())
    assert next(samples)["__key__"] == "s0-00000"
    with changed:
        assert changed.wait_for(lambda: len(opened) == 4, timeout=20)
    assert opened == set(urls[:4])
    next(samples)
    next(samples)
    with changed:
        assert changed.wait_for(lambda: len(opened) == 5, timeout=20)
    del samples


@pytest.mark.parametrize("options", WAYS)
def test_damage_is_reported_in_its_turn(options: dict[str, int], tmp_path: Path) -> None:
    """Whole samples before it come out, the handler is asked once, and the other shards are read."""
    urls = write_text_shards(tmp_path, (4, 4, 4, 4))
    cut = Path(urls[1])
    cut.write_bytes(tar_bytes(text_samples("s1-", 4))[:-1024][: 512 * 14])
    Path(urls[2]).unlink()
    pipe = IterableWrapper(urls).load_wds_shards(**options, handler=ignore_and_continue)
    grouped = pipe.group_by_key()
    expected = sorted([*text_keys([4]), "s1-00000", "s1-00001", *(key.replace("s0", "s3") for key in text_keys([4]))])
    assert sorted(keys_of(grouped)) == expected
    assert pipe.skipped == {"ShardFormatError": 1, "ShardOpenError": 1}
    keys = []
    with pytest.raises((ShardFormatError, ShardOpenError)):
        for sample in IterableWrapper(urls).load_wds_shards(**options).group_by_key():
            keys.append(sample["__key__"])
    assert keys == expected[:6] or options.get("interleave", 1) > 1


@pytest.mark.parametrize("options", WAYS)
def test_stream_ends_when_a_handler_stops(options: dict[str, int], tmp_path: Path) -> None:
    """All open shards end with the one that failed, by the loader's handler and by the grouping's."""
    urls = write_text_shards(tmp_path, (3, 9, 9, 9, 9))
    twice = tmp_path / "twice.tar"
    twice.write_bytes(tar_bytes([*text_samples("s0-", 2), *text_samples("s0-", 1)]))
    for broken, handlers in (("missing.tar", (ignore_and_stop, None)), (str(twice), (None, ignore_and_stop))):
        shards = [urls[0], broken, *urls[1:]]
        loader = IterableWrapper(shards).load_wds_shards(
            **options, handler=handlers[0] or torchdata_wds.reraise_exception
        )
        grouped = loader.group_by_key(handler=handlers[1] or torchdata_wds.reraise_exception)
        assert len(list(grouped)) < 20
        assert sum(loader.skipped.values()) + sum(grouped.skipped.values()) == 1


def test_keys_that_come_back_are_found_in_interleaved_shards(tmp_path: Path) -> None:
    """Each shard has its own keys: the same key in another shard is none that comes back."""
    for number in range(3):
        (tmp_path / f"{number}.tar").write_bytes(tar_bytes(text_samples("a", 3)))
    urls = sorted(map(str, tmp_path.glob("*.tar")))
    assert len(list(IterableWrapper(urls).load_wds_shards(interleave=2).group_by_key())) == 9
    (tmp_path / "1.tar").write_bytes(tar_bytes([*text_samples("a", 3), *text_samples("a", 1)]))
    with pytest.raises(ReappearingKeyError, match=r"1\.tar"):
        list(IterableWrapper(urls).load_wds_shards(interleave=2).group_by_key())


@pytest.mark.parametrize("options", WAYS)
def test_nothing_stays_open_when_the_reader_leaves_early(options: dict[str, int], tmp_path: Path) -> None:
    """At any sample, with threads waiting for room, and the pipe can be pickled and read again."""
    urls = write_text_shards(tmp_path, (3, 2, 4, 1, 5))
    pipe = IterableWrapper(urls).load_wds_shards(**options).group_by_key()
    for count in (0, 1, 4, 9):
        samples = iter(pipe)
        assert len(list(itertools.islice(samples, count))) == count
        assert len(keys_of(pickle.loads(pickle.dumps(pipe)))) == 15
        del samples
    assert sorted(keys_of(pipe)) == text_keys((3, 2, 4, 1, 5))


@pytest.mark.parametrize("options", WAYS)
def test_failure_of_the_source_comes_behind_the_shards_before_it(options: dict[str, int], tmp_path: Path) -> None:
    """Though the source is asked before their samples are out."""
    urls = write_text_shards(tmp_path, (3, 2))

    def failing() -> Iterator[str]:
        yield from urls
        raise OSError("no more shards")

    keys = []
    with pytest.raises(OSError, match="no more shards"):
        for sample in IterableWrapper(failing(), deepcopy=False).load_wds_shards(**options).group_by_key():
            keys.append(sample["__key__"])
    assert len(keys) == 5 or options.get("interleave", 1) > 1


@pytest.mark.parametrize("options", WAYS)
def test_items_that_are_no_shards_are_reported_in_their_turn(options: dict[str, int], tmp_path: Path) -> None:
    """They, and streams that somebody else has opened, have no thread."""
    urls = write_text_shards(tmp_path, (3, 2))
    with Path(urls[1]).open("rb") as file:
        loader = IterableWrapper([urls[0], 7, (urls[1], file)], deepcopy=False).load_wds_shards(
            **options, handler=ignore_and_continue
        )
        assert sorted(keys_of(loader.group_by_key())) == text_keys((3, 2))
    assert loader.skipped == {"ShardListError": 1}
    with pytest.raises(ShardListError, match="takes URLs"):
        list(IterableWrapper([7]).load_wds_shards(**options))


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2", None])
def test_wrong_numbers_raise_when_the_pipe_is_made(wrong: Any) -> None:
    """And 0 is no number of open shards."""
    with pytest.raises(ValueError, match="read_ahead must be a whole number from 0"):
        IterableWrapper([]).load_wds_shards(read_ahead=wrong)
    with pytest.raises(ValueError, match="interleave must be a whole number from 1"):
        IterableWrapper([]).load_wds_shards(interleave=wrong)
    with pytest.raises(ValueError, match="interleave must be a whole number from 1"):
        IterableWrapper([]).load_wds_shards(interleave=0)


# -------------------------------------------------------------------------------------------------------------- resume
def mixed(urls: list[str], **options: int) -> Any:
    shards = IterableWrapper(urls).shuffle().sharding_filter()
    samples = shards.load_wds_shards(**options).group_by_key().wds_shuffle(5, initial=2)
    return samples.wds_decode().map(augment).map(row)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"read_ahead": 2}, {"interleave": 3}, {"interleave": 2, "read_ahead": 1}])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_resumed_epoch_is_the_rest_when_shards_are_mixed(options: dict[str, int], workers: int, tmp_path: Path) -> None:
    """Wherever it was cut."""
    urls = shards_in(tmp_path, SMALL)
    epochs = run(mixed(urls, **options), workers, 2)
    cuts = (0, 1, 7, 13, 22, "between")
    with loader_of(mixed(urls, **options), workers) as loader:
        states, items = states_at(loader, cuts)
    assert items == epochs[0]
    for cut, state in zip(cuts, states, strict=True):
        assert resumed(state, workers, 2 if cut != "between" else 1) == left_of(epochs, 0, cut)


@pytest.mark.parametrize(
    "options", [{}, {"fields": "cls"}, {"handler": ignore_and_continue}], ids=["plain", "fields", "handler"]
)
def test_grouping_begins_in_the_middle_when_shards_are_interleaved(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any sample, from the last shard that began before it; shards that had ended are not opened again."""
    opened = []
    inner = ShardSource.open

    def noted(source: ShardSource, *rules: Any) -> Any:
        opened.append(source.part.url)
        return inner(source, *rules)

    monkeypatch.setattr(ShardSource, "open", noted)
    urls = write_text_shards(tmp_path, (4, 0, 3, 6, 1, 0, 5, 2))
    for url in urls[::2]:
        index_shard(url)
    for width in (2, 3, 9):
        pipe = IterableWrapper(urls).load_wds_shards(interleave=width).group_by_key(**options)
        pipe._watch = watch = Watch()
        whole = keys_of(pipe)
        facts = Facts()
        facts.add(watch.take())
        assert len(facts.shards) == len(urls)
        for first in range(len(whole)):
            early = sorted(random.Random(first).sample(range(first), min(first, 2)))
            begun, in_shard = facts.shard_of(0, Wanted(early, first).least)
            pipe.restart(Wanted(early, first), begun, in_shard, is_over=False)
            opened.clear()
            assert keys_of(pipe) == [whole[number] for number in early] + whole[first:]
            assert len(opened) == len(set(opened))
            assert begun is not None
            if not options:
                assert len(opened) == len(urls) - begun.ordinal - 1 + len(begun.places)
            told = Facts()
            told.add(watch.take())
            assert told.shards == facts.shards[len(facts.shards) - len(told.shards) :]
            assert told.lengths == facts.lengths
        assert keys_of(pipe) == whole


def test_resume_refuses_other_shards_when_they_are_interleaved(tmp_path: Path) -> None:
    """As where they come one after the other."""
    urls = write_text_shards(tmp_path, (4, 2, 3, 6))
    pipe = IterableWrapper(urls).load_wds_shards(interleave=2).group_by_key()
    pipe._watch = watch = Watch()
    list(pipe)
    facts = Facts()
    facts.add(watch.take())
    begun, in_shard = facts.shard_of(0, 13)
    other = IterableWrapper([urls[1], urls[0], *urls[2:]]).load_wds_shards(interleave=2).group_by_key()
    other.restart(Wanted((), 13), begun, in_shard, is_over=False)
    with pytest.raises(ShardListError, match="differ from those of the resumed run"):
        list(other)


UNFINISHED = """
import sys, torch
import torchdata_wds
from torch.utils.data.datapipes.iter import IterableWrapper
torch.kept = sys.modules["__main__"]  # so that its iterator outlives the names of other modules
samples = iter(IterableWrapper(sys.argv[1:]).load_wds_shards(read_ahead=2).group_by_key())
next(samples)
"""


@pytest.mark.slow
def test_a_program_may_end_with_an_unfinished_iterator(tmp_path: Path) -> None:
    """Nothing about it appears on standard error."""
    paths = write_text_shards(tmp_path, [3, 3, 3])
    done = subprocess.run([sys.executable, "-c", UNFINISHED, *paths], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
