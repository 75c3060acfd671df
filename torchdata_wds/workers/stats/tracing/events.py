"""The JSON of a trace, in the Trace Event Format that Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torchdata_wds.workers.stats.tracing.spans import Span

#: The colours of chrome://tracing; Perfetto chooses its own.
_COLOURS = {"wait": "terrible", "source": "bad", "blocked": "grey", "step": "good"}


def trace_json(
    process: int, title: str, tracks: Mapping[int, tuple[str, Iterable[Span]]], start: float, about: Mapping[str, str]
) -> bytes:
    """Writes the spans of tracks as JSON.

    `tracks` maps the number of each, in the order in which they are shown, to its name and spans; `start` is the moment
    that becomes 0. Spans that began earlier are cut.
    """
    events = [_metadata(process, 0, "process_name", title)]
    for number, (name, _) in tracks.items():
        events.append(_metadata(process, number, "thread_name", name))
        events.append({**_metadata(process, number, "thread_sort_index", ""), "args": {"sort_index": number}})
    found = [
        event
        for number, (_, spans) in tracks.items()
        for span in spans
        if (event := _event(process, number, span, start)) is not None
    ]
    events += sorted(found, key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    whole = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}
    return json.dumps(whole, separators=(",", ":")).encode()


def _metadata(process: int, track: int, name: str, value: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": track, "args": {"name": value}}


def _event(process: int, track: int, span: Span, start: float) -> dict[str, Any] | None:
    # In whole microseconds, both ends of neighbours are rounded alike, so that they still do not overlap.
    begin, end = max(round((span.start - start) * 1e6), 0), round((span.end - start) * 1e6)
    event: dict[str, Any] = {"name": span.name, "cat": span.kind, "ts": begin, "pid": process, "tid": track}
    if span.detail:
        event["args"] = {"detail": span.detail}
    if span.kind in _COLOURS:
        event["cname"] = _COLOURS[span.kind]
    if not span.seconds:
        return {**event, "ph": "i", "s": "t"} if end >= 0 else None
    return {**event, "ph": "X", "dur": end - begin} if end > begin else None
