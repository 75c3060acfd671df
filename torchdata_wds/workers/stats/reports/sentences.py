"""Writes a verdict as one sentence: what the training loop waits for, and what to try."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean, median

from torchdata_wds.workers.stats.figures import Figures
from torchdata_wds.workers.stats.reports.amounts import cut_text, seconds_text, share_text, size_text
from torchdata_wds.workers.stats.reports.cases import Case, load_of
from torchdata_wds.workers.stats.reports.verdict import Verdict, is_too_little

_WIDEST = 70
_HINTS = {
    "workers": "num_workers={enough}",
    "fewer_workers": "num_workers={cpus}, or more processors",
    "fast": "pip install 'torchdata_wds[fast]'",
    "read_ahead": "load_wds_shards(read_ahead=2)",
    "larger_shards": "larger shards",
    "cache_shards": ".cache_shards(folder)",
    "max_size": "image_decoder(..., max_size=n), since the images are made smaller later",
    "batch": ".batch(n).collate(wds_collate) in the workers",
    "collate": ".collate(wds_collate) after .batch(n)",
    "prefetch_factor": "prefetch_factor={ahead}",
    "even_shards": ".split_shards(index=True), or more shards than workers",
    "move_stage": "moving it before .join_workers()",
}


def sentence(verdict: Verdict, figures: Figures, options: Mapping[str, int]) -> str:
    """Writes a verdict of some figures as one sentence; `options` are those of `LoaderStats`."""
    case = Case(figures, options, 0)
    text = _SENTENCES[verdict.kind](verdict, case)
    tries = [_hint_text(hint, verdict, case) for hint in verdict.hints]
    last = " or ".join(filter(None, [", ".join(tries[:-1]), *tries[-1:]]))
    return f"{text}; try {last}." if tries else f"{text}."


def _hint_text(hint: str, verdict: Verdict, case: Case) -> str:
    ahead = 2 * case.options.get("prefetch_factor", 2)
    return _HINTS[hint].format(enough=verdict.enough, cpus=case.cpus, ahead=ahead)


def _unknown(verdict: Verdict, case: Case) -> str:
    items, seconds = case.waits.count, seconds_text(case.seconds)
    if is_too_little(case) or not verdict.share:
        return f"Too little has happened to say what holds the training back ({items:,} items in {seconds})"
    return f"{_loop(verdict)}, but too little is known to say for what ({items:,} items in {seconds})"


def _trainer(verdict: Verdict, case: Case) -> str:
    waits = case.waits
    first = ""
    if waits.first > 1 and waits.first > (waits.waited + waits.elsewhere) / 10:
        first = f", except {seconds_text(waits.first)} for the first item, while workers start and shuffles fill"
    return f"The training step is the limit: it waits {share_text(verdict.share)} of its time for the loader{first}"


def _loop(verdict: Verdict) -> str:
    return f"The training loop waits {share_text(verdict.share)} of its time"


def _workers(case: Case) -> str:
    return "of the workers' work" if case.count else "of the loader's work"


def _stage(verdict: Verdict, case: Case) -> str:
    part = f"{share_text(verdict.part)} {_workers(case)}"
    mostly = "mostly" if verdict.part >= 0.5 else "most"
    return f"{_loop(verdict)}, {mostly} for {_short(verdict.subject)}, which is {part}"


def _main_stage(verdict: Verdict, case: Case) -> str:  # noqa: ARG001
    part = share_text(verdict.part)
    subject = _short(verdict.subject)
    return f"{_loop(verdict)}, {part} of that for {subject}, which runs in the main process"


def _latency(verdict: Verdict, case: Case) -> str:
    first = seconds_text(case.slowest_source.first_byte)
    return f"{_source(verdict, case)}; the first byte of a shard comes after {first} on average"


def _bandwidth(verdict: Verdict, case: Case) -> str:
    source = case.slowest_source
    rate = f"; it sent {size_text(source.bytes / case.seconds)}/s" if source.source and case.seconds else ""
    return f"{_source(verdict, case)}{rate}"


def _source(verdict: Verdict, case: Case) -> str:
    subject = _short(verdict.subject) or "a source"
    return f"{_loop(verdict)}, mostly for bytes from {subject}, which is {share_text(verdict.part)} {_workers(case)}"


def _bad_worker(verdict: Verdict, case: Case) -> str:
    slow = next(worker for worker in case.workers if worker.number == verdict.worker)
    others = [worker for worker in case.workers if worker is not slow]
    what = "reads" if slow.reading > slow.busy else "is at"
    place = f", and mostly {what} {_short(verdict.subject)}" if verdict.subject else ""
    rest = "the others" if len(others) > 1 else "the other"
    own = seconds_text(load_of(slow) / max(slow.items, 1))
    usual = seconds_text(median(load_of(worker) / max(worker.items, 1) for worker in others))
    is_blocked = "are" if len(others) > 1 else "is"
    return (
        f"{_loop(verdict)} for worker {slow.number}, which holds back {rest}, since items come from all in turn: it "
        f"takes {own} per item{place}, while {rest} {'take' if len(others) > 1 else 'takes'} {usual} and {is_blocked} "
        f"blocked {share_text(mean(worker.blocked for worker in others) / case.seconds)} of the time"
    )


def _bursts(verdict: Verdict, case: Case) -> str:  # noqa: ARG001
    blocked = share_text(verdict.part)
    subject = f", mostly by {_short(verdict.subject)}," if verdict.subject else ""
    return (
        f"{_loop(verdict)} although the workers are blocked {blocked} of theirs: items are made in bursts{subject} and "
        "the queue is too short to bridge them"
    )


def _transport(verdict: Verdict, case: Case) -> str:
    if verdict.part:
        return f"{_loop(verdict)}, mostly for packing items, which is {share_text(verdict.part)} {_workers(case)}"
    ready = share_text(case.figures.found_ready / max(case.figures.asked, 1))
    wait = seconds_text(case.waits.waited / max(case.waits.count, 1))
    return (
        f"{_loop(verdict)} although {ready} of the messages from the workers were ready: taking an item from them "
        f"takes {wait} in the main process"
    )


def _processors(verdict: Verdict, case: Case) -> str:
    others = "" if case.used_cpus >= 0.5 * case.cpus else " with other programs"
    return (
        f"{_loop(verdict)}: {len(case.workers)} workers share {case.cpus} processors{others}, and compute only "
        f"{share_text(case.computing)} of the time in which they work, mostly at {_short(verdict.subject)}"
    )


def _uneven(verdict: Verdict, case: Case) -> str:
    count = round(verdict.part * len(case.workers))
    return (
        f"{_loop(verdict)} for worker {verdict.worker}, which still has items, while {count} of {len(case.workers)} "
        "workers have little or nothing to do: the shards are too few or too unequal"
    )


def _short(text: str) -> str:
    return cut_text(text, _WIDEST)


_SENTENCES: dict[str, Callable[[Verdict, Case], str]] = {
    "unknown": _unknown,
    "trainer": _trainer,
    "stage": _stage,
    "main": _main_stage,
    "latency": _latency,
    "bandwidth": _bandwidth,
    "worker": _bad_worker,
    "bursts": _bursts,
    "transport": _transport,
    "processors": _processors,
    "uneven": _uneven,
}
