"""A state is not resumed with shards of the same names that hold other samples, and is with copies of the same ones."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.cache_server import CacheServer, cache_server
from tests.kits.resume_kit import keys_of, left_of, loader_of, resumed, row, run, stopped
from tests.kits.shards import tar_bytes, text_samples, write_tar, write_text_shards
from tests.kits.torchdata import StatefulDataLoader
from torchdata_wds import ShardFormatError, ShardListError, StatefulPipeline, handlers, ignore_and_continue, index_shard
from torchdata_wds.workers.resume import signatures
from torchdata_wds.workers.resume.signatures import ShardContent, contents_of, describe_changes, examined_of

SIZES = (12, 12, 12)


def samples(urls: Sequence[str], **options: Any) -> Any:
    return IterableWrapper(urls).list_shards().sharding_filter().load_wds_shards(**options).group_by_key().map(row)


def rewritten(urls: Sequence[str], shard: int, count: int) -> str:
    """Writes one of the shards anew, with other samples; returns its name, for a pattern."""
    write_tar(Path(urls[shard]), text_samples("new", count))
    return re.escape(Path(urls[shard]).name)


# ------------------------------------------------------------------------------------------------------ what is known
def test_contents_tell_size_blocks_and_index(tmp_path: Path) -> None:
    """Of each local shard; what is elsewhere, is missing or is not a file is left out."""
    first, second = write_text_shards(tmp_path, (3, 4))
    header = index_shard(second)
    header.save(f"{second}.index")
    os.mkfifo(tmp_path / "pipe.tar")
    shards = [first, "https://host/x.tar", f"file://{second}", f"{tmp_path}/pipe.tar", str(tmp_path), "gone.tar", 7]
    found = contents_of(examined_of(shards))
    assert [content.number for content in found] == [0, 2]
    assert [content.size for content in found] == [Path(url).stat().st_size for url in (first, second)]
    assert [content.samples for content in found] == [None, 4]


def test_contents_are_of_few_shards_when_there_are_many(tmp_path: Path) -> None:
    """Evenly among all, so that a state stays small."""
    (url,) = write_text_shards(tmp_path, (1,))
    numbers = [content.number for content in contents_of(examined_of([url] * 1000))]
    assert len(numbers) <= 64
    assert numbers[:3] == [0, 16, 32]
    assert numbers[-1] > 980


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (ShardContent(0, 1000, 7, 5, "ab"), None),
        (ShardContent(0, 1000, 7, None, ""), None),
        (ShardContent(0, 2000, 7, 5, "ab"), "shard x.tar: 1,000 bytes then, 2,000 now"),
        (ShardContent(0, 1000, 7, 6, "ab"), "shard x.tar: 5 samples by its index then, 6 now"),
        (ShardContent(0, 1000, 8, 5, "ab"), "shard x.tar: other contents then, of the same size"),
        (ShardContent(0, 1000, 7, 5, "cd"), "shard x.tar: other contents then, of the same size"),
        (ShardContent(1, 9, 9, 9, "z"), None),
    ],
)
def test_changes_name_the_shard_and_what_it_was(now: ShardContent, change: str | None) -> None:
    """Only what is known of both times is compared."""
    then = ShardContent(0, 1000, 7, 5, "ab")
    found = describe_changes({0: "x.tar", 1: "y.tar"}, [tuple(then)], [tuple(now)])
    assert found == ([] if change is None else [change])


# ------------------------------------------------------------------------------------------------------------ refusals
def larger(urls: Sequence[str]) -> str:
    return rf"shard .*{rewritten(urls, 1, 40)}: [\d,]+ bytes then, [\d,]+ now"


def of_same_size(urls: Sequence[str]) -> str:
    before = Path(urls[2]).stat().st_size
    name = rewritten(urls, 2, SIZES[2])
    assert Path(urls[2]).stat().st_size == before
    return rf"shard .*{name}: other contents then, of the same size"


@pytest.mark.parametrize("cut", [14, "between"])
@pytest.mark.parametrize("change", [larger, of_same_size])
def test_resume_refuses_when_a_shard_was_written_anew(
    change: Callable[[Sequence[str]], str], cut: int | str, tmp_path: Path
) -> None:
    """Begun, read or still to come: the message names it."""
    urls = write_text_shards(tmp_path, SIZES)
    state = stopped(samples(urls).wds_epoch(30), 0, 0, cut)
    expected = change(urls)
    with pytest.raises(ValueError, match=f"the state belongs to a different run .*{expected}"):
        resumed(state, 0, 1)


def test_resume_names_few_shards_when_many_changed(tmp_path: Path) -> None:
    """Three, and how many more."""
    urls = write_text_shards(tmp_path, (2,) * 9)
    state = stopped(samples(urls), 0, 0, 5)
    names = [rewritten(urls, shard, 30) for shard in range(9)]
    with pytest.raises(ValueError, match=rf"{names[0]}.*{names[1]}.*{names[2]}.*and 6 more shards$"):
        resumed(state, 0, 1)


def test_resume_goes_on_when_shards_were_copied(tmp_path: Path) -> None:
    """Other dates and other inodes say nothing."""
    urls = write_text_shards(tmp_path, SIZES)
    whole = run(samples(urls), 0, 2)
    state = stopped(samples(urls), 0, 0, 14)
    for url in urls:
        copied = shutil.copyfile(url, f"{url}.copy")
        os.utime(copied, (1, 1))
        Path(copied).replace(url)
        index_shard(url).save(f"{url}.index")  # which was not there before
    assert resumed(state, 0, 2) == left_of(whole, 0, 14)


def test_stateful_pipeline_refuses_when_a_shard_was_written_anew(tmp_path: Path) -> None:
    """As WorkersReadingService does."""
    urls = write_text_shards(tmp_path, SIZES)

    def loader() -> Any:
        return StatefulDataLoader(StatefulPipeline(samples(urls)), batch_size=None, collate_fn=keys_of)

    first = loader()
    next(iter(first))
    state = first.state_dict()
    expected = larger(urls)
    again = loader()
    again.load_state_dict(state)
    with pytest.raises(ValueError, match=expected):
        list(again)


# ------------------------------------------------------------------------------------------------------- at the place
@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of shards on a server, of which nothing is known without a request."""
    monkeypatch.setattr(signatures, "contents_of", lambda shards: [])


def divided(urls: Sequence[str], **options: Any) -> Any:
    return IterableWrapper(urls).split_shards().load_wds_shards(**options).group_by_key()


#: Graphs, and how many of their items are 22 samples.
CUT: dict[str, tuple[Callable[..., Any], int]] = {
    "counted": (lambda urls: divided(urls).wds_decode(), 22),
    "counted, handler": (lambda urls: divided(urls, handler=ignore_and_continue), 22),
    "functions, made again": (samples, 22),
    "batches": (lambda urls: divided(urls).batch(2), 11),
    "epochs": (lambda urls: samples(urls).wds_epoch(70), 22),
    "batches in epochs": (lambda urls: divided(urls).batch(2).wds_epoch(40), 11),
    "shuffled": (lambda urls: divided(urls).wds_shuffle(3, initial=2), 22),
}


@pytest.mark.parametrize("case", CUT)
@pytest.mark.usefixtures("nothing_known")
def test_resume_raises_when_the_shard_that_goes_on_has_fewer_samples(case: str, tmp_path: Path) -> None:
    """Fewer than were taken of it: what would follow is not what is left; no handler skips that."""
    urls = write_text_shards(tmp_path, SIZES)
    build, cut = CUT[case]
    state = stopped(build(urls), 0, 0, cut)
    name = rewritten(urls, 1, 3)
    with pytest.raises((ShardFormatError, ShardListError), match=rf"{name} has (3|another number of) samples"):
        resumed(state, 0, 1)


@pytest.mark.usefixtures("nothing_known")
def test_resume_raises_when_an_epoch_is_shorter_than_what_was_taken_of_it(tmp_path: Path) -> None:
    """Where items are made again, and there are not as many."""
    urls = write_text_shards(tmp_path, (4, 4))
    state = stopped(samples(urls).filter(bool), 0, 0, 7)
    rewritten(urls, 1, 2)
    with pytest.raises(ShardListError, match="only 6 of the 7 items delivered"):
        resumed(state, 0, 1)


@pytest.mark.usefixtures("nothing_known")
def test_resume_goes_on_when_it_stands_at_a_shards_end(tmp_path: Path) -> None:
    """All samples of a shard were taken, and it has no more."""
    urls = write_text_shards(tmp_path, SIZES)
    whole = run(samples(urls), 0, 2)
    for cut in (12, 24, 36):
        assert resumed(stopped(samples(urls), 0, 0, cut), 0, 2) == left_of(whole, 0, cut)


@pytest.mark.parametrize("count", [9, 15])
@pytest.mark.usefixtures("nothing_known")
def test_resume_raises_when_a_shard_has_another_number_of_samples(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a worker was ahead of what was delivered, the number of a shard's samples is known."""
    for seconds in ("LINGER", "PATIENCE"):  # one message has all items
        monkeypatch.setattr(f"torchdata_wds.workers.processes.messages.{seconds}", 100)
    urls = write_text_shards(tmp_path, SIZES)
    state = stopped(samples(urls), 1, 0, 5)
    expected = rf"{rewritten(urls, 0, count)} has another number of samples .* 12 samples then, .* {count} now"
    with pytest.raises(ShardListError, match=expected):
        resumed(state, 1, 1)


def fail_on_zero(item: Any) -> Any:
    if item["__key__"].endswith("0"):
        raise ValueError("zero")
    return item


@pytest.mark.usefixtures("nothing_known")
def test_resume_raises_when_shards_are_read_again(tmp_path: Path) -> None:
    """Also where all items are made once more, because some were left out."""
    urls = write_text_shards(tmp_path, SIZES)
    state = stopped(divided(urls).wds_map(fail_on_zero, handler=ignore_and_continue), 0, 0, 25)
    with pytest.raises(ShardListError, match=rf"{rewritten(urls, 0, 14)} has another number of samples"):
        resumed(state, 0, 1)


@pytest.mark.usefixtures("nothing_known")
def test_resume_warns_when_handlers_may_have_skipped_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shard that could not be read when the run began, and can now, moves all places that follow it."""
    monkeypatch.setattr(handlers, "said", set())
    urls = write_text_shards(tmp_path, SIZES)
    whole = Path(urls[0]).read_bytes()
    Path(urls[0]).write_bytes(whole[:20_000])
    state = stopped(divided(urls, handler=ignore_and_continue).map(row), 0, 0, 20)
    Path(urls[0]).write_bytes(whole)
    resumed(state, 0, 1)
    assert "shard-000000.tar has another number of samples" in caplog.text
    assert "Or a handler skipped different samples" in caplog.text


# --------------------------------------------------------------------------------------------------------- on a server
@pytest.fixture
def server() -> Iterator[CacheServer]:
    with cache_server() as running:
        yield running


def put_shards(server: CacheServer, sizes: Sequence[int]) -> list[str]:
    return [
        server.put(f"{number}.tar", tar_bytes(text_samples(f"s{number}-", size))) for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("build", [divided, samples], ids=["counted", "made again"])
@pytest.mark.parametrize("read_ahead", [0, 2])
def test_resume_raises_when_a_shard_on_a_server_has_another_size(
    read_ahead: int, build: Callable[..., Any], workers: int, server: CacheServer
) -> None:
    """The size came with the shard, so that no request is made for a state."""
    urls = put_shards(server, SIZES * 2)
    state = stopped(build(urls, read_ahead=read_ahead, handler=ignore_and_continue), workers, 0, 30)
    assert resumed(state, workers, 1)
    for number in range(6):
        server.put(f"{number}.tar", tar_bytes(text_samples("new", 40)))
    with pytest.raises(ShardFormatError, match=r"\d\.tar has [\d,]+ bytes, and had [\d,]+ when the state was made"):
        resumed(state, workers, 1)


@pytest.mark.parametrize("read_ahead", [0, 2])
def test_resume_warns_when_a_shard_on_a_server_has_another_tag(
    read_ahead: int, server: CacheServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, where sizes are equal; the same tags are silent, and so are those of a server that sends none."""
    monkeypatch.setattr(handlers, "said", set())
    for server.tags in (False, True):
        state = stopped(divided(put_shards(server, SIZES * 2), read_ahead=read_ahead), 0, 0, 30)
        left = resumed(state, 0, 1)
        assert not caplog.messages
        for number, size in enumerate(SIZES * 2):
            server.put(f"{number}.tar", tar_bytes(text_samples(f"t{number}-", size)))
        assert len(resumed(state, 0, 1)) == len(left)
    (message,) = caplog.messages
    assert re.search(r"\d\.tar has the ETag \"\w+\", and had \"\w+\" when the state was made", message)


def test_state_makes_no_request(server: CacheServer) -> None:
    """However many shards are listed."""
    urls = put_shards(server, SIZES)
    pipe = samples([*urls, *(f"{urls[0]}?{number}" for number in range(500))])
    with loader_of(pipe, 0) as loader:
        next(iter(loader))
        before = dict(server.requests)
        assert loader.state_dict()
        assert dict(server.requests) == before


# ------------------------------------------------------------------------------------------------------------- index=
def counted(urls: Sequence[str], index: Any) -> Any:
    return IterableWrapper(urls).split_shards(index).load_wds_shards().group_by_key()


def test_signature_tells_the_counts_of_an_index(tmp_path: Path) -> None:
    """Those of the listed shards, from a dict or a local file, wherever that lies; those of a server are not asked."""
    urls = write_text_shards(tmp_path, SIZES)
    names = [Path(url).name for url in urls]
    table = dict.fromkeys(names, 12)
    (tmp_path / "sizes.json").write_text(json.dumps({**table, "other.tar": 7}))
    described = [
        signatures.describe_shards(counted(urls, index)).get("index")
        for index in (
            table,
            str(tmp_path / "sizes.json"),
            {**table, names[2]: 11},
            "https://host/sizes.json",
            True,
            None,
        )
    ]
    assert described[0] == described[1] != described[2]
    assert str(described[2]).startswith("35 samples (checksum ")
    assert described[3:] == [None] * 3


def test_resume_refuses_when_the_index_has_other_counts(tmp_path: Path) -> None:
    """The parts of consumers follow from it."""
    urls = write_text_shards(tmp_path, SIZES)
    table = dict.fromkeys(urls, 12)
    pipe = counted(urls, table)
    then = {"stages": [], **signatures.describe_shards(pipe)}
    now = {"stages": [], **signatures.describe_shards(counted(urls, {**table, urls[1]: 11}))}
    with pytest.raises(ValueError, match=r"Differences: index: '36 samples .* then, '35 samples .* now"):
        signatures.check_signature(then, now)
