"""Work on shards one by one, with one output for each: what ``map`` and ``proc`` have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator, Sequence
from contextlib import closing

from torchdata_wds.cli.arguments.inputs import part_of, tell_part
from torchdata_wds.cli.command import counted, say
from torchdata_wds.cli.map.shard_tasks import ShardTask, existing_targets, staged_tasks
from torchdata_wds.cli.map.target_names import name_targets
from torchdata_wds.cli.printing import printable
from torchdata_wds.cli.progress_bar import Progress
from torchdata_wds.storage import mask_url

#: Each task that is done, with "" or what failed.
Results = Generator[tuple[ShardTask, str], None, None]


def work_on_shards(
    urls: Sequence[str], arguments: argparse.Namespace, work: Callable[[list[ShardTask]], Results]
) -> int:
    """Makes the outputs that are not there yet.

    Args:
        urls: All shards, of which ``arguments.part`` chooses some.
        arguments: With ``output``, ``force`` and ``part``.
        work: Does tasks.

    Returns:
        The exit status: 1 if a shard failed.

    Raises:
        ShardListError: if the outputs cannot be named.
    """
    # named before a part is taken: numbers count all shards, and two parts never write one file
    tell_part(len(urls), arguments.part)
    pairs = part_of(list(zip(urls, name_targets(urls, arguments.output), strict=True)), arguments.part)
    skipped = set() if arguments.force else existing_targets(target for _, target in pairs)
    pairs = [pair for pair in pairs if pair[1] not in skipped]
    if skipped:
        say(f"skipped: {counted(len(skipped), 'output exists', 'outputs exist')} already (--force replaces them)")
    with staged_tasks(pairs, overwrite=arguments.force) as tasks:
        failed = _tell(work(tasks), len(tasks))
    say(f"{len(pairs) - failed:,} done, {failed:,} failed, {len(skipped):,} skipped")
    return 1 if failed else 0


def _tell(results: Results, total: int) -> int:
    """Shows progress and says which shards failed; returns their number."""
    failed = 0
    with closing(results), Progress("shards", total, only_on_terminal=True) as progress:
        for task, problem in results:
            progress.advance()
            if problem:
                failed += 1
                say(f"shard {printable(mask_url(task.source))} failed: {problem}")
    return failed
