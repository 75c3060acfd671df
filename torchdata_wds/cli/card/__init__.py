"""Describe a data set for others: a card for the Hugging Face hub, croissant.json, and energon's index.

wds card 'train-{000000..000003}.tar' --license cc-by-4.0
wds card --energon 'train-*.tar'
wds card --check 'train-*.tar'
wds card --force --split train='train-*[012].tar' --split validation='train-*3.tar' 'train-*.tar'
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from operator import itemgetter
from pathlib import Path

from torchdata_wds.cli.card.answers import Answers, recorded_answers
from torchdata_wds.cli.card.card_files import RIGHT, CardFile, save_all
from torchdata_wds.cli.card.croissant import croissant_json
from torchdata_wds.cli.card.energon import energon_files, parse_sample_type
from torchdata_wds.cli.card.energon_index import EnergonIndex
from torchdata_wds.cli.card.readme import other_configs, updated_readme
from torchdata_wds.cli.card.set_facts import SetFacts, ShardFacts, describe_shard
from torchdata_wds.cli.card.splits import Place, assign_splits, locate, split_rule
from torchdata_wds.cli.card.viewer import viewer_problem
from torchdata_wds.cli.command import Command, UsageError, add_parallel, flag, option
from torchdata_wds.cli.inputs import add_shards_argument, list_inputs
from torchdata_wds.cli.jobs import map_in_order
from torchdata_wds.cli.outputs import write_line
from torchdata_wds.cli.terminal import Progress, counted, printable, say
from torchdata_wds.errors import WdsError

README, CROISSANT = "README.md", "croissant.json"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shards_argument(parser, required=True, parts=False)
    text = "where the card goes (default: the folder of the shards); local shards must lie in it"
    option(parser, "-o --out", "FOLDER", text)
    option(parser, "--name", "NAME", "its title (default: that of an existing card, or the folder's name)")
    option(
        parser,
        "--license",
        "ID",
        "its license, such as cc-by-4.0 (default: that of an existing card, or none)",
    )
    option(parser, "--description", "TEXT", "what it is, in a sentence")
    option(parser, "--url", "URL", "its home page")
    option(parser, "--task", "TASK", "a task category of the hub, such as image-classification", action="append")
    option(parser, "--language", "CODE", "a language, such as en", action="append")
    text = "a split and its shards, by path or name; NAME alone has all (default: by train, val, test in names)"
    option(parser, "--split", "NAME[=GLOB]", text, split_rule, action="append", default=[])
    flag(
        parser,
        "--no-croissant",
        "write no croissant.json: it needs digests, for which shards are read",
    )
    flag(parser, "--energon", "also write what 'energon prepare' writes: .nv-meta, and x.tar.idx for x.tar")
    text = "energon's sample type, such as CaptioningSample:image=jpg,caption=txt (default: "
    text += "an existing dataset.yaml, or CrudeWebdataset)"
    option(parser, "--energon-sample", "TYPE:FIELD=NAME,...", text, parse_sample_type)
    text = "parts of the shards for energon's train, val and test, such as 8,1,1 (default: the splits of the card)"
    option(parser, "--energon-ratio", "A,B,C", text, _ratio)
    flag(parser, "--check", "write nothing: report each file that is missing or does not fit the shards")
    flag(parser, "--force", "replace a croissant.json or energon files that differ")
    cores = os.cpu_count() or 1
    add_parallel(parser, "read N shards at once, in processes (default: one per core)", cores)


def _ratio(text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected three numbers such as 8,1,1, not {text!r:.60}") from None
    if not (min(first, second, third) >= 0 and 0 < first + second + third < float("inf")):
        raise argparse.ArgumentTypeError(f"expected three numbers from 0 on, not all 0, not {text!r:.60}")
    return first, second, third


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.energon and (arguments.energon_sample or arguments.energon_ratio):
        raise UsageError("--energon-sample and --energon-ratio need --energon")
    urls = list_inputs(arguments)
    place = locate(urls, arguments.out)
    if arguments.energon and place.is_remote:
        raise UsageError("energon's files lie in the folder of the shards: --energon needs local ones")
    splits = assign_splits(place.paths, arguments.split)  # may fail, which costs less before the shards are read
    readme = _existing_readme(place.folder / README, keeps_configs=not (arguments.force or arguments.check))
    with ExitStack() as stack:
        index = stack.enter_context(EnergonIndex()) if arguments.energon else None
        facts = SetFacts(_described(arguments, urls, place, index), splits)
        files = _files(arguments, facts, place, readme, index)
        problem = viewer_problem(facts)
        if problem is not None:
            say(f"warning: {problem}")
        if arguments.check:
            return 1 if _faults(files) or problem is not None else 0
        written = save_all(files, overwrite=arguments.force)
    told = f"{counted(written, 'file')} written, {len(files) - written:,} unchanged"
    say(f"{told} ({counted(facts.samples, 'sample')} of {counted(len(urls), 'shard')})")
    return 0


def _described(
    arguments: argparse.Namespace, urls: Sequence[str], place: Place, index: EnergonIndex | None
) -> list[ShardFacts]:
    """Describes the shards in the order of their names, and adds them to the index."""
    describe = partial(describe_shard, hashed=not arguments.no_croissant, indexed=index is not None)
    jobs = sorted(zip(urls, place.paths, strict=True), key=itemgetter(1))
    shards = []
    made = map_in_order(describe, jobs, arguments.parallel)
    with closing(made), Progress("shards", urls=[url for url, _ in jobs], summarizes=True) as progress:
        for shard in made:
            if index is not None:
                index.add(shard)
            shards.append(shard._replace(kept_index=None))
            progress.advance(shard=shard.url, samples=shard.samples)
    return shards


def _files(
    arguments: argparse.Namespace, facts: SetFacts, place: Place, readme: str | None, index: EnergonIndex | None
) -> list[CardFile]:
    """Makes the files of the card, small ones in memory."""
    folder = None if place.is_remote else place.folder
    croissant = place.folder / CROISSANT
    given = _answers(arguments)
    answers = given.or_else(recorded_answers(readme, croissant.read_bytes() if croissant.exists() else None))
    name = answers.title or place.folder.absolute().name or "data"
    text = updated_readme(readme, facts, given, name, folder)
    files = [CardFile(README, place.folder / README, text.encode(), merges=True)]
    if not arguments.no_croissant:
        files.append(CardFile(CROISSANT, croissant, croissant_json(facts, answers, name).encode()))
    if index is not None:
        files += energon_files(facts, place.folder, index, arguments.energon_sample, arguments.energon_ratio)
    return files


def _answers(arguments: argparse.Namespace) -> Answers:
    lists = tuple(arguments.task or ()), tuple(arguments.language or ())
    return Answers(arguments.name, arguments.license, arguments.description, arguments.url, *lists)


def _existing_readme(path: Path, *, keeps_configs: bool) -> str | None:
    """Reads the README; raises WdsError if a card would spoil it."""
    if not path.exists():
        return None
    readme = _text_of(path)
    if (others := other_configs(readme)) and keeps_configs:
        lost = f"{path} has configurations that would be lost: {', '.join(others)}"
        raise WdsError(f"{lost}. Choose another folder with -o, or pass --force to replace them")
    return readme


def _text_of(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # line ends stay as they are
    except UnicodeDecodeError as error:
        raise WdsError(f"{path} is not UTF-8 text: {error}") from error


def _faults(files: Sequence[CardFile]) -> int:
    """Prints a line for each file that is missing or stale, and returns how many there are."""
    states = [(file.name, file.state()) for file in files]
    faults = [(name, state) for name, state in states if state != RIGHT]
    for name, state in faults:
        write_line(printable(f"{name}: {state}"))
    say(f"{counted(len(states) - len(faults), 'file')} right, {len(faults):,} missing or stale")
    return len(faults)


COMMAND = Command(__doc__, _add_arguments, _run)
