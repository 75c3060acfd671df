"""Where streams are, in a few bytes: turns, facts, signatures, and the generators that items draw from."""

import base64
import functools
import io
import json
import pickle
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import torchdata_wds  # registers the functional forms
from tests.kits.shards import tar_bytes
from tests.kits.workers_kit import run_script
from torchdata_wds import WdsLoader
from torchdata_wds.pipes.resume_facts import EpochEnded, Facts, PassBegun, PassEnded, ShardBegun, SkipNotice, Wanted
from torchdata_wds.storage import listing
from torchdata_wds.workers.resume import packed_facts
from torchdata_wds.workers.resume.checkpoints import UNSTARTED, Checkpoint, Streams, Turns
from torchdata_wds.workers.resume.packed_facts import pack_facts, unpack_facts
from torchdata_wds.workers.resume.signatures import check_signature, describe_shards, graph_signature
from torchdata_wds.workers.resume.stream import OwnGenerators, seed_generators

assert torchdata_wds.ShardLister

#: The first draws of random and numpy behind seed_generators(1, 2, "item", 3).
STORED = (0.022275808984766776, 0.5957489990859683)


# -------------------------------------------------------------------------------------------------------------- turns
def test_turns_equal_a_round_robin_when_workers_end_at_any_time() -> None:
    """At every number of items: how many each worker had given, and whose turns come, as a loop over queues finds."""
    draw = random.Random(1)
    for _ in range(100):
        workers = draw.randrange(1, 6)
        left = [draw.randrange(0, 7) for _ in range(workers)]
        given = [draw.randrange(0, 4) for _ in range(workers)]
        order = draw.sample(range(workers), draw.randrange(1, workers + 1))
        turns = Turns(given, order)
        queue = list(order)
        history = [(list(given), list(queue))]
        while queue:
            worker = queue.pop(0)
            if left[worker]:
                left[worker] -= 1
                given = [count + (number == worker) for number, count in enumerate(given)]
                queue.append(worker)
                history.append((given, list(queue)))
            else:
                turns.note_end(len(history) - 1, worker)
                history[-1] = (given, list(queue))
        assert [turns.at(taken) for taken in range(len(history))] == history


def test_turns_look_back_when_stages_behind_are_ahead() -> None:
    """What was delivered may be less than what was taken: an end that came after it does not count yet."""
    turns = Turns([0, 0], [0, 1])
    turns.note_end(3, 1)
    assert turns.at(2) == ([1, 1], [0, 1])
    assert turns.at(3) == ([2, 1], [0])


# ------------------------------------------------------------------------------------------------------------ packing
def facts_of(lengths: list[list[int]], *, item: int = 0) -> Facts:
    """What is known of a stream of passes whose shards have so many samples; each sample is an item."""
    facts = Facts()
    for passing, shards in enumerate(lengths):
        facts.add([PassBegun(passing, item)])
        samples = 0
        for ordinal, length in enumerate(shards):
            facts.add([ShardBegun(passing, samples, ordinal, ordinal * 7)])
            samples += length
        item += samples
        if passing + 1 < len(lengths):
            facts.add([PassEnded(passing, samples)])
    return facts


def known(facts: Facts) -> tuple[Any, ...]:
    return facts.passes, facts.shards, facts.lengths, facts.skipping, facts.shards_cut, facts.passes_cut


def test_packed_facts_are_whole_when_there_are_few() -> None:
    """Nothing is left out where there is room; unpacking gives what was packed."""
    facts = facts_of([[3, 0, 5], [2, 6]])
    facts.add([SkipNotice("WdsMapper")])
    found = unpack_facts(json.loads(json.dumps(pack_facts(facts, 9, 1, 2))))
    assert known(found) == known(facts)
    assert isinstance(found.shards[0], ShardBegun)
    assert isinstance(found.passes[0], PassBegun)


def test_packed_facts_keep_what_was_open_when_shards_are_interleaved() -> None:
    """The numbers of the open shards and what they had given; a state has room for fewer shards then."""
    facts = Facts()
    facts.add([PassBegun(0, 0)])
    facts.add([ShardBegun(0, 3 * number, number, 7, ((number, 0), (2, 5 * number))) for number in range(300)])
    found = unpack_facts(json.loads(json.dumps(pack_facts(facts, 600, 1, 2))))
    assert set(found.shards) <= set(facts.shards)
    assert found.shard_of(0, 600) == (ShardBegun(0, 600, 200, 7, ((200, 0), (2, 1000))), True)
    assert 40 < len(found.shards) < 60


def test_packed_facts_keep_the_place_when_they_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last beginning before the item is kept, and is known to be the last; the first pass and shard are too."""
    monkeypatch.setattr(packed_facts, "_MOST_BYTES", 0)
    draw = random.Random(2)
    lengths = [[draw.randrange(0, 4) for _ in range(200)] for _ in range(9)]
    facts = facts_of(lengths)
    ends = [sum(map(sum, lengths[: number + 1])) for number in range(len(lengths))]
    for item in draw.sample(range(ends[-1]), 300):
        passing = next(number for number, end in enumerate(ends) if item < end)
        sample = item - facts.passes[passing].item
        found = unpack_facts(pack_facts(facts, item, 1, 4))
        assert len(found.shards) <= 16
        assert found.passes[0] == facts.passes[0]
        assert found.pass_of(Wanted((), item)) == PassBegun(passing, item - sample)
        assert found.shard_of(passing, sample) == facts.shard_of(passing, sample)
        assert found.shard_of(passing, sample)[1]


def test_packed_facts_claim_nothing_that_was_left_out_when_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every earlier sample, a beginning is found that is before it, and said to be the last only if it is."""
    monkeypatch.setattr(packed_facts, "_MOST_BYTES", 0)
    facts = facts_of([[2] * 60])
    found = unpack_facts(pack_facts(facts, 100, 1, 1))
    exact = 0
    for sample in range(118):
        begun, is_last = found.shard_of(0, sample)
        assert begun is not None
        assert begun.samples <= sample
        if is_last:
            assert (begun, True) == facts.shard_of(0, sample)
            exact += 1
    assert 0 < exact < 118


def test_packed_facts_take_batches_as_so_many_samples_when_they_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place among the shards is reckoned in samples."""
    monkeypatch.setattr(packed_facts, "_MOST_BYTES", 0)
    found = unpack_facts(pack_facts(facts_of([[1] * 400]), 20, 10, 4))
    assert found.shard_of(0, 200) == (ShardBegun(0, 200, 200, 1400), True)


def checkpoint_of(workers: int, shards: int, *, passes: int = 1) -> Checkpoint:
    """A state of workers that have each told of so many shards, of which a state must name some."""
    draw = random.Random(3)
    facts = facts_of([[draw.randrange(1000) for _ in range(shards // passes)] for _ in range(passes)])
    facts.shards = [begun._replace(digest=draw.getrandbits(32)) for begun in facts.shards]
    end = facts.passes[-1].item + 1000
    packed = [pack_facts(facts, draw.randrange(end), 1, workers) for _ in range(workers)]
    counts = [draw.randrange(10**6) for _ in range(workers)]
    signature = {
        "num_workers": workers,
        "ranks": 64,
        "rank": 63,
        "distributed": True,
        "seed": 2**63 + 1,
        "stages": [["SampleDecoder", draw.getrandbits(32)] for _ in range(20)],
        "shards": [[shards, draw.getrandbits(32)]],
        "contents": [
            [
                [number, 10**8 + draw.randrange(10**6), draw.getrandbits(32), 10_000, draw.randbytes(8).hex()]
                for number in range(64)
            ]
        ],
    }
    generator = [[draw.getrandbits(32) for _ in range(12)] for _ in range(2)]
    return Checkpoint(signature, 7, True, generator, (2**64 - 1, 2**62), [counts, list(range(workers)), packed])


@pytest.mark.parametrize(
    ("workers", "shards", "passes"), [(1, 5000, 1), (4, 5000, 1), (64, 5000, 1), (8, 5000, 500), (64, 640, 64)]
)
def test_checkpoint_is_small_when_workers_have_told_much(workers: int, shards: int, passes: int) -> None:
    """Less than 10 KB for workers that have each begun 5,000 shards: with more workers, each keeps fewer marks."""
    state = checkpoint_of(workers, shards, passes=passes)
    assert len(state.dump()) < 10_000
    assert len(json.dumps(state.to_plain())) < 10_000


def saved_by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "through", [lambda plain: json.loads(json.dumps(plain)), saved_by_torch], ids=["json", "torch"]
)
def test_checkpoint_is_the_same_when_it_was_saved(through: Any) -> None:
    """As bytes, and as plain values that went through JSON or torch; seeds up to 2**64 - 1 stay exact."""
    state = checkpoint_of(3, 20)
    assert Checkpoint.load(state.dump()) == state
    assert Checkpoint.from_plain(through(state.to_plain())) == state
    assert Checkpoint.from_plain({**state.to_plain(), "more": 1}) == state


def test_checkpoint_tells_people_where_it_is() -> None:
    """The keys are those of a loader that never ran; the items are those of all workers."""
    state = checkpoint_of(3, 20)
    plain = state.to_plain()
    assert plain.keys() == UNSTARTED.keys()
    assert (plain["version"], plain["epoch"], plain["in_epoch"], plain["item"]) == (2, 7, True, sum(state.streams[0]))
    assert state._replace(in_epoch=False, streams=None).to_plain()["item"] == 0


def deflated(data: bytes) -> bytes:
    return zlib.compress(data)


def as_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Trap:
    """Fails the test when it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a state was unpickled",)


OLDER = zlib.compress(pickle.dumps(({"stages": []}, 1, True, Trap(), None, None), pickle.HIGHEST_PROTOCOL))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"", "not a state of torchdata_wds: it is damaged"),
        (b"no state", "not a state of torchdata_wds: it is damaged"),
        ("text", "not a state of torchdata_wds: it is damaged"),
        (None, "not a state of torchdata_wds: it is damaged"),
        (lambda data: data[:-9], "not a state of torchdata_wds: it is damaged"),
        (lambda data: data[:2] + data[3:], "not a state of torchdata_wds: it is damaged"),
        (deflated(b"[" * 100_000), "not a state of torchdata_wds: it is damaged"),
        (deflated(b'{"version": 2, "epoch": ' + b"1" * 5000 + b"}"), "not a state of torchdata_wds: it is damaged"),
        (deflated(b"\xff"), "not a state of torchdata_wds: it is damaged"),
        (deflated(b"null"), "expected a dict, got NoneType"),
        (deflated(b"[1]"), "expected a dict, got list"),
        (deflated(b'{"version": 2}'), "it holds other values than a state does"),
        (deflated(b'{"version": 3}'), "made by another version of torchdata_wds"),
        (OLDER, "made by another version of torchdata_wds"),
    ],
)
def test_checkpoint_refuses_when_bytes_are_no_state(damage: Any, message: str) -> None:
    """A ValueError says what is wrong; nothing is ever unpickled."""
    data = damage(checkpoint_of(2, 10).dump()) if callable(damage) else damage
    with pytest.raises(ValueError, match=message):
        Checkpoint.load(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "expected a dict, got NoneType"),
        ([1], "expected a dict, got list"),
        ({"version": 1}, "made by another version of torchdata_wds"),
        ({"version": "2"}, "made by another version of torchdata_wds"),
        ({"epoch": "1"}, "'epoch' must be of type int, not str"),
        ({"epoch": True}, "'epoch' must be of type int, not bool"),
        ({"in_epoch": 1}, "'in_epoch' must be of type bool, not int"),
        ({"item": 1.5}, "'item' must be of type int, not float"),
        ({"item": -1}, "'item' must not be negative, and is -1"),
        ({"epoch": 0}, "it holds other values than a state does"),
        ({"state": b""}, "'state' must be of type str, not bytes"),
        ({"state": ""}, "not a state of torchdata_wds: it is damaged"),
        ({"state": "abc!"}, "its text is damaged"),
        ({"state": "\u00e9"}, "its text is damaged"),
        ({"state": as_text(b"no state")}, "not a state of torchdata_wds: it is damaged"),
        ({"state": as_text(OLDER)}, "made by another version of torchdata_wds"),
        ({"state": as_text(deflated(b"{}"))}, "it holds other values than a state does"),
        ({"state": as_text(deflated(b'{"signature": {}, "stream_seeds": 1}'))}, "it holds other values"),
        ({"state": as_text(deflated(b'{"signature": {}, "streams": [[0], [0]]}'))}, "it holds other values"),
    ],
)
def test_checkpoint_refuses_when_plain_values_are_no_state(change: Any, message: str) -> None:
    """A ValueError names the value that is wrong."""
    plain = {**checkpoint_of(2, 10).to_plain(), **change} if isinstance(change, dict) else change
    with pytest.raises(ValueError, match=message):
        Checkpoint.from_plain(plain)


@pytest.mark.parametrize("name", UNSTARTED)
def test_checkpoint_refuses_when_a_key_is_missing(name: str) -> None:
    """It names the key."""
    plain = checkpoint_of(2, 10).to_plain()
    del plain[name]
    with pytest.raises(ValueError, match=f"not a state of torchdata_wds: it has no '{name}'"):
        Checkpoint.from_plain(plain)


def test_checkpoint_says_so_when_the_state_is_of_an_older_pipeline() -> None:
    """Such states were nested dicts without a version."""
    with pytest.raises(ValueError, match="made by another version of torchdata_wds"):
        Checkpoint.from_plain({"signature": {}, "epoch": 0, "stream_epoch": 0, "is_over": False, "streams": ()})


def test_streams_begin_where_the_epoch_ended_when_they_continue() -> None:
    """The next epoch of a stream begins in the pass in which the last one ended, with the shards that are known."""
    facts = facts_of([[3, 4], [5, 2]])
    facts.add([EpochEnded(1, 6)])
    following = Streams(1, facts=[facts], continues=True).next_epoch()
    assert following.facts[0].passes == [PassBegun(1, -6)]
    assert following.facts[0].shard_of(1, 6) == (ShardBegun(1, 5, 1, 7), True)
    assert Streams(1, facts=[facts_of([[3]])]).next_epoch().facts[0].shards == []


# --------------------------------------------------------------------------------------------------------- generators
@pytest.fixture(autouse=True)
def _keep_generators() -> Iterator[None]:
    kept = OwnGenerators()
    yield
    with kept.in_use():
        pass


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_generators_give_the_stored_values_when_seeded() -> None:
    """The same on every machine and Python version: random and numpy were written down."""
    seed_generators(1, 2, "item", 3)
    first = draws()
    assert first[:2] == STORED
    seed_generators(1, 2, "item", 3)
    assert draws() == first


@pytest.mark.parametrize("place", [(1, 2, "item", 4), (1, 3, "item", 3), (0, 2, "item", 3), (1, 2, "pass", 3)])
def test_generators_differ_when_any_part_of_the_place_does(place: tuple[Any, ...]) -> None:
    """Items, workers and epochs have draws of their own, in each of the three generators."""
    seed_generators(1, 2, "item", 3)
    first = draws()
    seed_generators(*place)
    assert not set(first) & set(draws())


def test_generators_are_nobody_elses_when_kept_apart() -> None:
    """What is drawn inside moves nothing outside, also where it raises, and goes on where it was."""
    seed_generators("outside")
    expected = [draws() for _ in range(3)]
    seed_generators("inside")
    inside = [draws() for _ in range(2)]
    own = OwnGenerators()
    seed_generators("outside")
    found = [draws()]
    with own.in_use():
        seed_generators("inside")
        assert draws() == inside[0]
    found.append(draws())
    with pytest.raises(KeyError), own.in_use():
        assert draws() == inside[1]
        raise KeyError
    assert [*found, draws()] == expected


# --------------------------------------------------------------------------------------------------------- signatures
def double(value: Any) -> Any:
    return value * 2


def half(value: Any) -> Any:
    return value / 2


class Scale:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, value: Any) -> Any:
        return value * self.factor


def graph(**changed: Any) -> IterDataPipe:
    """A graph of stages with arguments of many kinds."""
    given: dict[str, Any] = {
        "buffer_size": 10,
        "fields": ["txt", "cls"],
        "factor": 2,
        "mean": np.arange(3.0),
        "size": 4,
        "handler": torchdata_wds.reraise_exception,
        "folder": "one",
        "interleave": 2,
        "elsewhere": {"read_ahead": 0},
    }
    given.update(changed)
    pipe = IterableWrapper(["a.tar"]).sharding_filter().cache_shards(given["folder"])
    pipe = pipe.load_wds_shards(handler=given["handler"], interleave=given["interleave"], **given["elsewhere"])
    pipe = pipe.group_by_key(fields=given["fields"]).wds_shuffle(given["buffer_size"])
    return pipe.map(functools.partial(double, given["factor"], mean=given["mean"])).batch(given["size"])


@pytest.mark.parametrize(
    ("changed", "stage"),
    [
        ({"buffer_size": 11}, "SampleShuffler"),
        ({"fields": ["txt"]}, "KeyGrouper"),
        ({"factor": 3}, "Mapper"),
        ({"mean": np.arange(4.0)}, "Mapper"),
        ({"mean": np.arange(3.0) + 1e-9}, "Mapper"),
        ({"mean": torch.arange(3.0)}, "Mapper"),
        ({"size": 5}, "Batcher"),
        ({"interleave": 3}, "ShardLoader"),
    ],
    ids=str,
)
def test_signature_names_the_stage_when_an_argument_differs(changed: dict[str, Any], stage: str) -> None:
    """Numbers, lists and arrays count by their values."""
    before, after = graph_signature(graph()), graph_signature(graph(**changed))
    assert [name for (name, old), (_, new) in zip(before, after, strict=True) if old != new] == [stage]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"fields": ("txt", "cls")},
        {"handler": torchdata_wds.ignore_and_continue},
        {"folder": "two"},
        {"elsewhere": {"read_ahead": 3, "rewrite": "s3://=/data/"}},
    ],
    ids=["again", "tuple", "handler", "folder", "place"],
)
def test_signature_stays_when_nothing_that_counts_differs(changed: dict[str, Any]) -> None:
    """Built again it is the same; handlers, and whence bytes come, may differ."""
    assert graph_signature(graph()) == graph_signature(graph(**changed))


def test_signature_stays_when_the_graph_has_run() -> None:
    """What pipes note for themselves while they run is no argument of theirs."""
    pipe = IterableWrapper(range(9)).shuffle().sharding_filter().wds_shuffle(3).wds_map(double).wds_epoch(4).batch(2)
    mixed = pipe.wds_mix(IterableWrapper(range(4)).wds_shuffle(2), stop="first")
    before = graph_signature(mixed)
    for found in (mixed, mixed):
        next(iter(found))
        list(found)
    assert graph_signature(mixed) == before
    assert graph_signature(pickle.loads(pickle.dumps(mixed))) == before


@pytest.mark.parametrize(("one", "other"), [(double, half), (Scale(1), double), (str, int)])
def test_signature_differs_when_functions_have_other_names(one: Any, other: Any) -> None:
    """Of functions the names count, of objects their class."""
    assert graph_signature(IterableWrapper([1]).map(one)) != graph_signature(IterableWrapper([1]).map(other))


def test_signature_has_both_chains_when_a_stage_is_added() -> None:
    """Order counts, and where streams join."""
    first, second = IterableWrapper([1]).map(double), IterableWrapper([1]).batch(2)
    signatures = [graph_signature(pipe) for pipe in (first, first.batch(2), second.map(double), first.zip(second))]
    assert [[name for name, _ in found] for found in signatures] == [
        ["Mapper", "IterableWrapper"],
        ["Batcher", "Mapper", "IterableWrapper"],
        ["Mapper", "Batcher", "IterableWrapper"],
        ["Zipper", "Mapper", "IterableWrapper", "Batcher", "IterableWrapper"],
    ]


SIGN = """
from tests.workers.resume.test_states import graph, Scale
from torchdata_wds.workers.resume.signatures import graph_signature
pipe = graph(mean={"txt", "cls", "json", "jpg", "png"}, factor=Scale(2))
print(graph_signature(pipe))
"""


@pytest.mark.slow
def test_signature_is_the_same_when_another_process_makes_it() -> None:
    """Whatever order sets have there, and wherever objects lie."""
    found = {run_script(SIGN).stdout for _ in range(2)}
    assert len(found) == 1
    assert "KeyGrouper" in found.pop()


def test_shards_are_told_apart_when_they_differ_in_name_or_order() -> None:
    """The count and a checksum of each source; what a pattern stands for counts, not the pattern."""
    lists = [["a.tar"], ["b.tar"], ["a.tar", "b.tar"], ["b.tar", "a.tar"], ["a.tar", "a.tar"], []]
    digests = [describe_shards(IterableWrapper(urls).shuffle())["shards"] for urls in lists]
    assert [count for ((count, _),) in digests] == [1, 1, 2, 2, 2, 0]
    assert len({str(digest) for digest in digests}) == len(lists)
    listed = describe_shards(IterableWrapper(["{a,b}.tar"]).list_shards())["shards"]
    assert listed == describe_shards(IterableWrapper([["a.tar"], "b.tar"]).list_shards())["shards"]


def test_shards_of_all_sources_are_told_when_streams_join() -> None:
    """One entry a source; a pipe that two others read counts once."""
    shared = IterableWrapper(["a.tar", "b.tar"])
    pipe = shared.map(double).zip(shared.map(half), IterableWrapper(range(3)))
    assert sorted(count for count, _ in describe_shards(pipe)["shards"]) == [2, 3]


def test_shards_are_looked_up_when_a_pattern_names_a_folder(tmp_path: Path) -> None:
    """Files that have come since make another checksum."""
    (tmp_path / "a.tar").touch()
    pipe = IterableWrapper([str(tmp_path)]).list_shards().sharding_filter()
    before = describe_shards(pipe)["shards"]
    assert before == describe_shards(pipe)["shards"]
    (tmp_path / "b.tar").touch()
    assert describe_shards(pipe)["shards"][0][0] == 2


def test_epoch_searches_a_store_once_when_no_state_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may list for minutes: its shards are listed for a state only when one is taken."""
    searched = []
    search = listing._search_store
    fsspec.filesystem("memory").pipe("/listed-once/a.tar", tar_bytes([("a.cls", b"1")]))
    monkeypatch.setattr(listing, "_search_store", lambda place: searched.append(place) or search(place))
    pipe = IterableWrapper(["memory://listed-once/*.tar"]).list_shards().sharding_filter().load_wds_shards()
    loader = WdsLoader(pipe.group_by_key())
    items = iter(loader)
    assert next(items)["__key__"] == "a"
    assert len(searched) == 1
    assert loader.state_dict()
    assert len(searched) == 2


def signature_of(pipe: IterDataPipe, **more: Any) -> dict[str, Any]:
    shards = describe_shards(pipe)["shards"]
    return {"num_workers": 2, "seed": 5, "stages": graph_signature(pipe), "shards": shards, **more}


def test_signatures_agree_when_all_is_the_same() -> None:
    """Nothing is raised, whether or not the earlier one went through JSON."""
    check_signature(signature_of(graph()), signature_of(graph()))
    check_signature(
        json.loads(json.dumps(signature_of(graph(), seed=2**64 - 1))), signature_of(graph(), seed=2**64 - 1)
    )
    check_signature(signature_of(graph(), place=[1, 2]), signature_of(graph(), place=(1, 2)))


def test_signatures_name_every_difference_when_there_are_several() -> None:
    """One message has them all, each with what it was and what it is."""
    then = signature_of(graph(), ranks=4)
    now = signature_of(graph(size=5, buffer_size=3), num_workers=3, seed=None, shards=[(3, 0xAB), (1, 1)])
    with pytest.raises(ValueError, match="Differences: ") as caught:
        check_signature(then, now)
    differences = str(caught.value).partition("Differences: ")[2].split("; ")
    count, digest = then["shards"][0]
    assert differences == [
        "num_workers: 2 then, 3 now",
        "seed: 5 then, None now",
        f"shards: {count} shards (checksum {digest:08x}) then, "
        "3 shards (checksum 000000ab) + 1 shards (checksum 00000001) now",
        "ranks: 4 then, None now",
        "the arguments of Batcher",
        "the arguments of SampleShuffler",
    ]


def test_generators_keep_gaussian_halves_apart_when_one_was_drawn() -> None:
    """Both random and numpy make Gaussian numbers in pairs: the second of a pair belongs to who drew the first."""
    seed_generators("a")
    expected = [random.gauss(0, 1), np.random.randn(), random.gauss(0, 1), np.random.randn()]
    own = OwnGenerators()
    seed_generators("a")
    found = [random.gauss(0, 1), np.random.randn()]
    with own.in_use():
        random.gauss(0, 1)
        np.random.randn()
    assert [*found, random.gauss(0, 1), np.random.randn()] == expected
