"""What `stats()` of a loader returns: its figures, what they mean, and the line that an epoch logs at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchdata_wds.workers.stats.figures import Figures
from torchdata_wds.workers.stats.reports.amounts import rate_text, seconds_text
from torchdata_wds.workers.stats.reports.rank_table import rank_lines, slowest_rank
from torchdata_wds.workers.stats.reports.report import report_lines, wrapped
from torchdata_wds.workers.stats.reports.sentences import sentence
from torchdata_wds.workers.stats.reports.verdict import Verdict, judge

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderStats:
    """What `stats()` returns: the figures of the running or last epoch, and of the time since the last call.

    Attributes:
        epoch: The number of the epoch, from 0.
        rank: The rank that these figures are of.
        total: The whole epoch so far.
        recent: Since the last call in this epoch, or since it began.
        options: What the verdict looks at besides: ``num_workers``, ``prefetch_factor``, ``cpus`` (how many processors
            this process may use), ``ahead`` (items ready now), ``load`` (how many processes of the machine want a
            processor, in percent of its processors), ``pool`` (1 if the workers run elsewhere), and facts about the
            graph.

    Example:
        >>> from torchdata_wds.workers.stats.figures import Figures, Waits
        >>> figures = Figures(10.0, items=300, waits=Waits(count=300, waited=0.1, elsewhere=9.9))
        >>> LoaderStats(0, 0, figures, figures).sentence()
        'The training step is the limit: it waits 1% of its time for the loader.'
    """

    epoch: int
    rank: int
    total: Figures
    recent: Figures
    options: Mapping[str, int] = field(default_factory=dict)

    def verdict(self) -> Verdict:
        """Decides what holds the training back: since the last call if that says enough, else in the epoch."""
        return self._judged()[0]

    def sentence(self) -> str:
        """Writes the verdict as one sentence, with what to try."""
        verdict, figures = self._judged()
        return sentence(verdict, figures, self.options)

    def report(self) -> str:
        """Writes the figures as tables, and the sentence of the verdict after them."""
        workers = self.options.get("num_workers", len(self.total.workers))
        title = f"epoch {self.epoch}, rank {self.rank}, {workers} worker{'s' * (workers != 1)}"
        title += " (the main process)" * (not workers)
        lines = report_lines(self.total, self.recent, is_here=not workers)
        return "\n".join([title, "", *lines, "", *wrapped(self.sentence())])

    def _judged(self) -> tuple[Verdict, Figures]:
        verdict = judge(self.recent, self.options, self.epoch)
        if verdict.kind != "unknown":
            return verdict, self.recent
        return judge(self.total, self.options, self.epoch), self.total

    def to_plain(self) -> dict[str, Any]:
        """Returns everything as dicts, lists, texts and numbers, which JSON takes."""
        return asdict(self)


class RankStats(list[LoaderStats]):
    """What `stats(all_ranks=True)` returns: the figures of each rank, in order."""

    def report(self) -> str:
        """Writes a table with a row for each rank, and a sentence about the rank whose loader is waited for longest."""
        if not self:
            return "No rank has any figures."
        lines = rank_lines([(stats.rank, stats.total, stats.verdict()) for stats in self])
        slowest = self[slowest_rank([stats.total for stats in self])]
        return "\n".join([*lines, "", *wrapped(f"Rank {slowest.rank}: {slowest.sentence()}")])


def logs_epochs() -> bool:
    """Returns whether anybody sees what `log_epoch` logs."""
    return logger.isEnabledFor(logging.INFO)


def log_epoch(stats: LoaderStats) -> None:
    """Logs an epoch that is over in one line."""
    if not logs_epochs():
        return
    total = stats.total
    logger.info(
        "epoch %d%s: %s items in %s (%s/s), of which the training loop waited %s, for the first %s. %s",
        stats.epoch,
        f", rank {stats.rank}" if stats.rank else "",
        f"{total.items:,}",
        seconds_text(total.seconds),
        rate_text(total.items, total.seconds),
        seconds_text(total.waits.waited),
        seconds_text(total.waits.first),
        sentence(judge(total, stats.options, stats.epoch), total, stats.options),
    )
