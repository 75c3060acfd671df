"""The YAML at the head of a README: keys of ours are replaced, all others stay as they are written."""

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchdata_wds.errors import WdsError

_FENCE = re.compile(r"\A---[ \t\r]*\n(.*?)^---[ \t\r]*(?:\n|\Z)", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"([A-Za-z_][\w-]*)[ \t]*:(?:[ \t\r]|$)")
_PLAIN = re.compile(r"[A-Za-z_./][\w ./*-]*(?<! )")
# a parser takes these for something else than text
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n", ".nan", ".inf"})


class Entry(NamedTuple):
    """A key of the front matter and the lines that it stands in, with comments before it."""

    key: str
    text: str

    def comments(self) -> str:
        """Returns the lines before the key."""
        return "".join(itertools.takewhile(lambda line: not _KEY.match(line), self.text.splitlines(keepends=True)))


def divide(readme: str) -> tuple[list[Entry], str]:
    """Divides a README into the entries of its front matter, none if it has no such, and its text.

    Raises:
        WdsError: if the front matter is not one key after another in plain YAML.
    """
    found = _FENCE.match(readme)
    if found is None:
        return [], readme
    entries: list[Entry] = []
    pending = ""
    for line in found[1].splitlines(keepends=True):
        start = _KEY.match(line)
        if start is not None:
            entries.append(Entry(start[1], pending + line))
            pending = ""
        elif entries and (line[0] in " \t\r\n-" or not line.strip()) and not pending:
            entries[-1] = Entry(entries[-1].key, entries[-1].text + line)
        elif line.startswith("#") or not line.strip():
            pending += line
        else:
            what = f"the front matter of the README has a line other than 'key: value': {line.strip()!r:.60}"
            raise WdsError(f"{what}. Correct it by hand first")
    if pending:
        entries.append(Entry("", pending))
    return entries, readme[found.end() :]


def scalar_of(entries: list[Entry], key: str) -> str | None:
    """Returns the value of a key that stands on its own line, as text; None if there is none or it is a list."""
    text = next((entry.text.removeprefix(entry.comments()) for entry in entries if entry.key == key), "")
    value = text.partition(":")[2].strip()
    if "\n" in value:
        return None
    if value[:1] in ("'", '"') and value[-1:] == value[:1] and len(value) > 1:
        return value[1:-1]
    return value if value and value[0] not in "[{|>&*!#" else None


def config_names(entries: list[Entry]) -> list[str]:
    """Returns the names of the configurations that a README describes."""
    texts = [entry.text for entry in entries if entry.key in ("configs", "dataset_info")]
    found = [name for text in texts for name in re.findall(r"config_name:[ \t]*[\"']?([^\s\"',}]+)", text)]
    return list(dict.fromkeys(found))


def replace(entries: list[Entry], values: Mapping[str, Any]) -> str:
    """Returns the front matter with new values for some keys; None removes a key."""
    places = {entry.key: number for number, entry in enumerate(entries)}
    texts = [entry.text for entry in entries]
    for key, value in values.items():
        text = "" if value is None else "".join(f"{line}\n" for line in yaml_lines({key: value}))
        if key in places:
            texts[places[key]] = entries[places[key]].comments() + text
        else:
            texts.append(text)
    return f"---\n{''.join(texts)}---\n"


def with_tag(entries: list[Entry], tag: str) -> list[Entry]:
    """Adds a tag to those that a README has, or as its first."""
    for number, (key, text) in enumerate(entries):
        if key != "tags" or re.search(rf"(?<![\w-]){re.escape(tag)}(?![\w-])", text):
            continue
        items = re.findall(r"^([ \t]*)- ", text, re.MULTILINE)
        if items:
            text = f"{text.rstrip()}\n{items[-1]}- {tag}\n"
        elif text.rstrip().endswith("]"):
            start, _, rest = text.partition("[")
            text = f"{start}[{tag}{', ' if rest.strip() != ']' else ''}{rest}"
        return [*entries[:number], Entry(key, text), *entries[number + 1 :]]
    if any(key == "tags" for key, _ in entries):
        return entries
    return [*entries, Entry("tags", f"tags:\n- {tag}\n")]


def yaml_lines(value: Any, indent: str = "") -> Iterator[str]:
    """Yields the lines of a mapping or list in block style, as the hub writes it."""
    pairs = value.items() if isinstance(value, Mapping) else ((None, item) for item in value)
    for key, item in pairs:
        head = f"{indent}-" if key is None else f"{indent}{yaml_scalar(key)}:"
        if not isinstance(item, (Mapping, list)):
            yield f"{head} {yaml_scalar(item)}"
        elif not item:
            yield f"{head} {'{}' if isinstance(item, Mapping) else '[]'}"
        elif key is None:
            first, *rest = yaml_lines(item, f"{indent}  ")
            yield f"{head} {first.strip()}"
            yield from rest
        else:
            yield head
            yield from yaml_lines(item, indent if isinstance(item, list) else f"{indent}  ")


def yaml_scalar(value: object) -> str:
    """Writes a text or number; text that YAML could take for something else goes into quotes.

    Example:
        >>> yaml_scalar("train-*.tar"), yaml_scalar("1K<n<10K"), yaml_scalar("no"), yaml_scalar(7)
        ('train-*.tar', '"1K<n<10K"', '"no"', '7')
    """
    if not isinstance(value, str):
        return json.dumps(value)
    is_plain = _PLAIN.fullmatch(value) and value.lower() not in _WORDS
    return value if is_plain else json.dumps(value, ensure_ascii=False)
