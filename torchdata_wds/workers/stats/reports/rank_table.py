"""Writes the figures of all ranks as one table."""

from __future__ import annotations

from collections.abc import Sequence

from torchdata_wds.workers.stats.figures import Figures
from torchdata_wds.workers.stats.reports.amounts import rate_text, seconds_text, share_text, size_text, table_lines
from torchdata_wds.workers.stats.reports.verdict import Verdict


def rank_lines(ranks: Sequence[tuple[int, Figures, Verdict]]) -> list[str]:
    """Writes a row for each rank, of its figures and what holds it back."""
    header = ["rank", "items", "items/s", "read", "waits", "p50", "p99", "held back by"]
    rows = []
    for rank, figures, verdict in ranks:
        waits, seconds = figures.waits, figures.seconds
        rows.append(
            [
                str(rank),
                f"{figures.items:,}",
                rate_text(figures.items, seconds),
                f"{size_text(figures.bytes / seconds)}/s" if seconds else "-",
                share_text(waits.running_share),
                seconds_text(waits.p50),
                seconds_text(waits.p99),
                " ".join(filter(None, [verdict.kind, verdict.subject])),
            ]
        )
    return table_lines(header, rows, has_texts=True)


def slowest_rank(ranks: Sequence[Figures]) -> int:
    """Returns the place of the rank whose training loop waits longest for its loader; the others wait for that rank."""
    return max(range(len(ranks)), key=lambda place: ranks[place].waits.running_share)
