"""The README of a data set: front matter for the hub, and a part about the shards; all other text stays as it is."""

import json
from collections.abc import Iterator
from pathlib import Path

from torchdata_wds.cli.card.answers import Answers
from torchdata_wds.cli.card.field_kinds import kind_of
from torchdata_wds.cli.card.front_matter import config_names, divide, replace, with_tag
from torchdata_wds.cli.card.hub import CONFIG, TAG, hub_values, path_patterns
from torchdata_wds.cli.card.set_facts import SetFacts, total_bytes
from torchdata_wds.cli.terminal import counted
from torchdata_wds.workers.stats.reports.amounts import size_text

_BEGIN = "<!-- wds card: the next run replaces this part, up to its end -->"
_END = "<!-- end of wds card -->"


def other_configs(readme: str | None) -> list[str]:
    """Returns the names of configurations in an existing README that are not of our making, and would be lost."""
    return [] if readme is None else [name for name in config_names(divide(readme)[0]) if name != CONFIG]


def updated_readme(readme: str | None, facts: SetFacts, answers: Answers, name: str, folder: Path | None) -> str:
    """Returns the README with this front matter and this part about the shards.

    Other keys and all other text stay as they are; a README without our part gets only the front matter. The data set's
    name is the heading of a new one.
    """
    given = {
        "license": answers.license,
        "task_categories": list(answers.tasks),
        "language": list(answers.languages),
        "pretty_name": answers.title,
    }
    values = {key: value for key, value in given.items() if value} | hub_values(facts, folder)
    entries, text = ([], None) if readme is None else divide(readme)
    head = replace(with_tag(entries, TAG), values)
    part = "\n".join((_BEGIN, *_part_lines(facts, folder), _END))
    if text is None:
        told = f"{answers.description}\n\n" if answers.description else ""
        return f"{head}\n# {name}\n\n{told}{part}\n"
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    return f"{head}{before}{part}{after}" if begin and end else head + text


def _part_lines(facts: SetFacts, folder: Path | None) -> Iterator[str]:
    yield f"{counted(facts.samples, 'sample')} in {counted(len(facts.shards), 'shard')} of WebDataset (tar archives)."
    yield ""
    yield "| split | samples | shards | size |"
    yield "|---|---|---|---|"
    splits = facts.by_split()
    for split, shards in splits.items():
        samples, size = sum(shard.samples for shard in shards), total_bytes(shards)
        yield f"| {split} | {samples:,} | {len(shards):,} | {'' if size is None else size_text(size)} |"
    yield ""
    yield "| field | content | samples | size | mean |"
    yield "|---|---|---|---|---|"
    for name, (samples, size) in sorted(facts.fields.items()):
        yield f"| {_code(name)} | {kind_of(name)} | {samples:,} | {size_text(size)} | {size_text(size / samples)} |"
    yield ""
    split, shards = next(iter(splits.items()))
    patterns = path_patterns([shard.path for shard in shards], folder)
    yield from _example(split, patterns[0] if len(patterns) == 1 else patterns, is_local=folder is not None)


def _code(name: str) -> str:
    return "`" + name.replace("`", "'").replace("|", "\\|") + "`"


def _example(split: str, shards: str | list[str], *, is_local: bool) -> Iterator[str]:
    """Yields an example of reading a split with each library."""
    if isinstance(shards, list) and len(shards) > 3:
        shards = shards[:3]
        yield "The first shards, read with torchdata_wds, webdataset and Hugging Face Datasets:"
    else:
        yield "Read with torchdata_wds, webdataset and Hugging Face Datasets, in this folder:"
    yield ""
    yield "```python"
    yield "from torchdata_wds import WebDataset"
    yield ""
    yield f"samples = WebDataset({json.dumps(shards)})"
    yield "```"
    yield ""
    yield "```python"
    if is_local and isinstance(shards, str):
        yield "import glob"
        yield ""
        shown = f"sorted(glob.glob({json.dumps(shards)}))"
    else:
        shown = json.dumps(shards)
    yield "import webdataset"
    yield ""
    yield f"samples = webdataset.WebDataset({shown}, shardshuffle=False)"
    yield "```"
    yield ""
    yield "```python"
    yield "from datasets import load_dataset"
    yield ""
    yield f'samples = load_dataset(".", split={json.dumps(split)}, streaming=True)'
    yield "```"
