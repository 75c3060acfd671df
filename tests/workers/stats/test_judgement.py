"""The verdict on figures that are made up: each kind, its neighbours, and the hints that the figures back."""

import json
import logging
from dataclasses import replace
from random import Random
from typing import Any, get_args

import pytest

from torchdata_wds.workers.stats.figures import At, Figures, SourceFigures, StageFigures, Waits, WorkerFigures
from torchdata_wds.workers.stats.loader_stats import LoaderStats, RankStats, log_epoch, logs_epochs
from torchdata_wds.workers.stats.reports.verdict import Kind, Verdict, judge

SECONDS = 10.0
SERVER = "https://data.example.org"
DECODE = "wds_decode('pil')"


def workers(*rows: tuple[float, float, float, float], items: int = 100, at: At | None = None) -> Any:
    """One for each (busy, blocked, reading, cpu), in shares of the time."""
    return tuple(WorkerFigures(number, *(part * SECONDS for part in row), items, at) for number, row in enumerate(rows))


def stage(text: str = DECODE, seconds: float = 8.0, *, in_main: bool = False) -> StageFigures:
    return StageFigures(text, in_main, 200, 200, seconds)


def server(**values: Any) -> SourceFigures:
    return SourceFigures(SERVER, **{"shards": 10, "bytes": 10**9, "seconds": 9.0, "waited": 9.0, **values})


def figures(share: float, found: Any, *rest: StageFigures | SourceFigures, **values: Any) -> Figures:
    """Of a loop that waits a share of its time, all waits alike."""
    waits = Waits(200, share * SECONDS, (1 - share) * SECONDS, share * SECONDS / 200, share * SECONDS / 180)
    stages = tuple(part for part in rest if isinstance(part, StageFigures))
    sources = tuple(part for part in rest if isinstance(part, SourceFigures))
    made = Figures(SECONDS, 200, 200, 10**9, waits, 100, 10, found, stages, sources)
    return replace(made, **values)


def verdict(found: Figures, epoch: int = 0, **options: int) -> Verdict:
    given = {"num_workers": len(found.workers), "prefetch_factor": 2, "cpus": 8, **options}
    text = LoaderStats(epoch, 0, found, found, given).report()
    assert max(map(len, text.splitlines())) <= 100
    assert text.endswith(".")
    return judge(found, given, epoch)


BUSY = (0.95, 0.0, 0.05, 0.95)
AHEAD = (0.1, 0.85, 0.05, 0.1)
READS = (0.1, 0.0, 0.9, 0.1)
FULL = (1.0, 0.0, 0.0, 0.4)

CASES = {
    "trainer": (figures(0.01, workers(AHEAD, AHEAD), stage()), "trainer", "", ()),
    "stage": (figures(0.6, workers(BUSY, BUSY), stage(), stage("batch(4)", 1)), "stage", DECODE, ("workers",)),
    "main": (figures(0.6, workers(AHEAD, AHEAD), stage(seconds=5, in_main=True)), "main", DECODE, ("move_stage",)),
    "latency": (
        figures(0.6, workers(READS, READS), stage(seconds=1), server(first_byte=0.8)),
        *("latency", SERVER, ("read_ahead", "workers")),
    ),
    "bandwidth": (
        figures(0.6, workers(READS, READS), stage(seconds=1), server(first_byte=0.1)),
        *("bandwidth", SERVER, ("read_ahead", "workers")),
    ),
    "worker": (figures(0.6, workers(BUSY, AHEAD, AHEAD), stage()), "worker", DECODE, ()),
    "shard": (figures(0.6, workers(AHEAD, READS), stage(), server(slowest=f"{SERVER}/a.tar")), "worker", "a.tar", ()),
    "bursts": (figures(0.3, workers((0.6, 0.4, 0, 0.5)), stage()), "bursts", DECODE, ("prefetch_factor",)),
    "transport": (figures(0.9, workers(AHEAD, AHEAD), stage(), found_ready=95), "transport", "", ("batch",)),
    "processors": (
        figures(0.6, workers(*[FULL] * 20), stage(seconds=150)),
        *("processors", DECODE, ("fewer_workers",)),
    ),
    "here": (figures(0.6, workers((0.6, 0, 0, 1.0)), stage(seconds=5)), "stage", DECODE, ("workers",)),
}


@pytest.mark.parametrize("name", CASES)
def test_verdict_names_what_holds_the_training_back(name: str) -> None:
    """Kind, subject and hints."""
    found, kind, subject, hints = CASES[name]
    judged = verdict(found, num_workers=0 if name == "here" else len(found.workers))
    assert (judged.kind, judged.hints) == (kind, hints)
    assert judged.subject.endswith(subject)


def test_worker_is_named_by_its_number_when_it_holds_back_the_others() -> None:
    """The slow one, not one that is blocked."""
    found = figures(0.6, workers(AHEAD, AHEAD, BUSY), stage())
    assert verdict(found).worker == 2
    assert "worker 2" in LoaderStats(0, 0, found, found).sentence()


def test_worker_is_not_to_blame_when_the_main_process_waits_for_others() -> None:
    """It works most, but what it makes is there in time."""
    found = workers(BUSY, AHEAD, AHEAD)
    for awaited, kind in ((5.0, "worker"), (0.1, "bursts")):
        made = (replace(found[0], awaited=awaited), replace(found[1], awaited=3.0), found[2])
        assert verdict(figures(0.6, made, stage())).kind == kind


def test_packing_items_is_transport_when_it_takes_most_of_the_work() -> None:
    """Before a stage that takes less."""
    found = [replace(worker, sending=6.0) for worker in workers((0.3, 0, 0, 0.9), (0.3, 0, 0, 0.9))]
    judged = verdict(figures(0.6, tuple(found), stage()))
    assert (judged.kind, judged.hints) == ("transport", ("batch",))
    assert verdict(figures(0.6, tuple(found), stage()), batches=1, collates=0).hints == ("collate",)
    assert verdict(figures(0.6, tuple(found), stage()), batches=1, collates=1).hints == ()


def test_workers_are_uneven_when_most_have_nothing_to_do() -> None:
    """Streams that ended leave the others alone."""
    found = list(workers(BUSY, (0.1, 0, 0, 0.1), (0.1, 0, 0, 0.1)))
    found[1:] = [replace(worker, items=10) for worker in found[1:]]
    judged = verdict(figures(0.6, tuple(found), stage()))
    assert (judged.kind, judged.worker, judged.hints) == ("uneven", 0, ("even_shards",))


@pytest.mark.parametrize(
    "found",
    [
        Figures(),
        figures(0.9, workers(BUSY), waits=Waits(2, 9.0, 1.0)),
        figures(0.9, workers(BUSY), stage(), waits=Waits(100, 9.0, 0.1, first=8.9)),
        figures(0.9, ()),
        figures(0.9, workers(BUSY)),
    ],
    ids=["nothing", "two items", "only the first", "no workers", "no stages"],
)
def test_verdict_is_unknown_when_there_is_too_little(found: Figures) -> None:
    """A verdict needs items, time, and figures of stages."""
    assert verdict(found).kind == "unknown"


def test_first_item_does_not_count_when_the_rest_comes_in_time() -> None:
    """Workers start and shuffles fill."""
    found = figures(0.6, workers(AHEAD), stage(), waits=Waits(200, 6.1, 4.0, first=6.0))
    assert verdict(found).kind == "trainer"
    assert "6.0 s for the first item" in LoaderStats(0, 0, found, found).sentence()


def test_stage_that_sleeps_is_not_taken_for_too_few_processors() -> None:
    """Only processors in use can be too few, and sleeping workers may be many."""
    judged = verdict(figures(0.6, workers(*[(1.0, 0, 0, 0.01)] * 10), stage(seconds=90)), cpus=2)
    assert (judged.kind, judged.hints, judged.enough) == ("stage", ("workers",), 25)


def test_processors_are_too_few_when_other_programs_use_them() -> None:
    """As the load of the machine tells; more workers would not help."""
    found = figures(0.6, workers(*[(0.9, 0, 0, 0.1)] * 6), stage(seconds=50))
    assert verdict(found, cpus=2, load=300).kind == "processors"
    assert "with other programs" in LoaderStats(0, 0, found, found, {"cpus": 2, "load": 300}).sentence()
    assert verdict(found, cpus=2, load=50).kind == "stage"
    few = figures(0.6, workers((0.9, 0, 0, 0.1)), stage())
    assert (verdict(few, load=50, cpus=2).hints, verdict(few, load=300, cpus=2).hints) == (("workers",), ())


def test_more_workers_are_no_hint_when_the_processors_are_busy() -> None:
    """Two that compute on two processors, one of which the training loop needs."""
    assert verdict(figures(0.6, workers(BUSY, BUSY), stage()), cpus=2).hints == ()
    assert "workers" in verdict(figures(0.6, workers(BUSY, BUSY), stage()), cpus=2, pool=1).hints


@pytest.mark.parametrize(
    ("options", "hint", "is_given"),
    [
        ({"arrays": 1, "simplejpeg": 0}, "fast", True),
        ({"arrays": 1, "simplejpeg": 1}, "fast", False),
        ({"arrays": 0, "simplejpeg": 0}, "fast", False),
        ({"images": 1, "shrinks": 1, "limits": 0}, "max_size", True),
        ({"images": 1, "shrinks": 1, "limits": 1}, "max_size", False),
        ({}, "max_size", False),
    ],
)
def test_hints_for_decoding_need_what_the_graph_lacks(options: dict[str, int], hint: str, is_given: bool) -> None:
    """Images are decoded, without the extra or a limit."""
    assert (hint in verdict(figures(0.6, workers(BUSY), stage()), **options).hints) is is_given


def test_extra_is_a_hint_when_gzip_takes_the_time() -> None:
    """If a shard has that suffix, and isal is not installed."""
    for shard, isal, hints in (("a.tar.gz", 0, ("fast",)), ("a.tar.gz", 1, ()), ("a.tar", 0, ())):
        found = figures(0.6, workers(BUSY, at=At("", shard, 0, 0)), stage("load_wds_shards()"))
        assert verdict(found, isal=isal, cpus=1).hints == hints


@pytest.mark.parametrize(
    ("epoch", "options", "source", "hint", "is_given"),
    [
        (0, {}, server(), "read_ahead", True),
        (0, {"read_ahead": 2}, server(), "read_ahead", False),
        (0, {}, replace(server(), source="local files"), "read_ahead", False),
        (0, {}, replace(server(), source="commands"), "read_ahead", True),
        (1, {}, server(), "cache_shards", True),
        (0, {}, server(), "cache_shards", False),
        (1, {"caches": 1}, server(), "cache_shards", False),
        (1, {}, server(hits=3), "cache_shards", False),
        (0, {}, server(first_byte=0.9, bytes=10**6), "larger_shards", True),
        (0, {}, server(first_byte=0.1, bytes=10**6), "larger_shards", False),
    ],
)
def test_hints_for_sources_need_what_the_graph_lacks(
    epoch: int, options: dict[str, int], source: SourceFigures, hint: str, is_given: bool
) -> None:
    """A remote source, read again, late or small."""
    judged = verdict(figures(0.6, workers(READS), source), epoch, **options)
    assert (hint in judged.hints) is is_given


def test_waits_are_bursts_when_a_few_are_long() -> None:
    """Most messages are ready, but the loop waits for the late ones."""
    late = figures(0.6, workers(AHEAD, AHEAD), stage(), found_ready=90)
    late = replace(late, waits=replace(late.waits, p50=1e-5, p99=0.6))
    assert verdict(late).kind == "bursts"


def test_recent_figures_decide_when_they_are_enough() -> None:
    """What has changed since the last call counts."""
    slow, fast = figures(0.6, workers(BUSY, BUSY), stage()), figures(0.0, workers(AHEAD, AHEAD), stage())
    assert LoaderStats(0, 0, slow, fast).verdict().kind == "trainer"
    assert LoaderStats(0, 0, slow, Figures()).verdict().kind == "stage"
    assert "since the last call" in LoaderStats(0, 0, slow, fast).report()


def test_report_shows_skips_and_masks_nothing_away_when_names_are_long() -> None:
    """Long names are cut, numbers are not."""
    long = StageFigures("wds_map(" + "f" * 200 + ")", False, 1_234_567, None, 8.0, {"ValueError": 7})
    at = At("wds_map(" + "g" * 90 + ")", "s3://bucket/" + "h" * 90, 5, 0.1)
    text = LoaderStats(0, 0, *[figures(0.6, workers(*[BUSY] * 40, at=at), long)] * 2).report()
    assert max(map(len, text.splitlines())) <= 100
    assert "1,234,567" in text
    assert "7 ValueError" in text
    assert sum(line[:1].isdigit() for line in text.splitlines()) == 8  # of 40 workers


def test_report_can_be_written_of_any_figures() -> None:
    """Of every kind, and of figures that contradict each other."""
    random, kinds = Random(1), set()

    def amount() -> float:
        return random.choice([0.0, 0.0, 1e-7, 0.3, 2.0, 9.0])

    def count() -> int:
        return random.choice([0, 1, 7, 200, 10**9])

    def source() -> SourceFigures:
        return SourceFigures(SERVER, count(), count(), amount(), amount(), amount(), count())

    for _ in range(1000):
        found = [
            WorkerFigures(n, amount(), amount(), amount(), amount(), count(), None, amount(), amount())
            for n in range(random.choice([0, 1, 2, 3, 30]))
        ]
        stages = [StageFigures(DECODE, bool(n % 2), None, count(), amount()) for n in range(random.randrange(3))]
        sources = [source() for _ in range(random.randrange(2))]
        waits = Waits(count(), amount(), amount(), amount(), amount(), random.choice([0.0, amount()]))
        parts: Any = map(tuple, (found, stages, sources))
        seconds = random.choice([0.0, 10.0, 1e5])
        made = Figures(seconds, count(), count(), count(), waits, count(), count(), *parts)
        kinds.add(verdict(made, random.randrange(2), cpus=random.choice([0, 1, 8]), num_workers=len(found)).kind)
    assert len(kinds) >= len(get_args(Kind)) - 2


def test_ranks_are_compared_when_there_are_several() -> None:
    """A row each, and the sentence of the one that the others wait for."""
    slow, fast = figures(0.6, workers(READS), server()), figures(0.0, workers(AHEAD), stage())
    text = RankStats(LoaderStats(0, rank, *[found] * 2) for rank, found in enumerate([fast, slow, fast])).report()
    assert len([line for line in text.splitlines() if line[:1].isdigit()]) == 3
    assert "Rank 1: The training loop waits 60%" in " ".join(text.split())
    assert RankStats().report() == "No rank has any figures."


def test_stats_are_plain_values() -> None:
    """JSON takes them."""
    found = figures(0.6, workers(BUSY, at=At(DECODE, "a.tar", 5, 0.1)), stage(), server())
    plain = LoaderStats(0, 0, found, found).to_plain()
    assert json.loads(json.dumps(plain))["total"]["workers"][0]["at"]["shard"] == "a.tar"


def test_epoch_is_logged_when_info_is_enabled(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and nothing otherwise."""
    found = figures(0.6, workers(BUSY, BUSY), stage())
    assert not logs_epochs()
    log_epoch(LoaderStats(3, 1, found, found))
    assert not caplog.records
    with caplog.at_level(logging.INFO, "torchdata_wds"):
        assert logs_epochs()
        log_epoch(LoaderStats(3, 1, found, found))
    (record,) = caplog.records
    begun = "epoch 3, rank 1: 200 items in 10 s (20/s), of which the training loop waited 6.0 s, for the first 0 s."
    assert record.getMessage().startswith(begun)
