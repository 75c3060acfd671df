"""What is odd about a data set's samples: fields, members and keys that are not like most."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

from torchdata_wds.cli.stats.counting import DatasetTally
from torchdata_wds.cli.stats.keys import LONGEST_KEY, UNSORTED
from torchdata_wds.cli.stats.repeats import Places, find_repeats, joined_keys
from torchdata_wds.cli.stats.tallies import Examples, Place
from torchdata_wds.cli.terminal import counted

_REASONS = {
    "key-not-utf-8": ("key is not UTF-8", "keys are not UTF-8"),
    "key-not-printable": ("key has characters that do not print", "keys have characters that do not print"),
    "key-blank-ends": ("key begins or ends with a blank", "keys begin or end with a blank"),
    "key-long": (f"key is longer than {LONGEST_KEY} characters", f"keys are longer than {LONGEST_KEY} characters"),
}
_MOST_RARE = 20  # fields; of more, only the number is told


class Oddity(NamedTuple):
    """Something that is odd about samples or shards."""

    kind: str  # in a word
    text: str  # with the number
    number: int
    examples: list[Place] = []  # noqa: RUF012 - never changed


def find_oddities(tally: DatasetTally, places: Places) -> Iterator[Oddity]:
    """Yields what is odd, fields first."""
    yield from _odd_fields(tally)
    yield from _odd_members(tally)
    yield from _odd_keys(tally, places)
    for reason, count in sorted(tally.left_out.items()):
        what = counted(count, "member belongs", "members belong")
        yield Oddity("no-sample", f"{what} to no sample: {reason}", count)
    empty = [shard.shard for shard in tally.shards if not shard.samples and shard.shard not in tally.damaged]
    if empty:
        yield Oddity(
            "empty-shard", f"{counted(len(empty), 'shard has', 'shards have')} no samples", len(empty), _named(empty)
        )
    if tally.damaged:
        text = f"{counted(len(tally.damaged), 'shard', 'shards')} lost samples to damage"
        yield Oddity("damaged-shard", text, len(tally.damaged), _named(tally.damaged))


def _named(shards: Iterable[str]) -> list[Place]:
    examples = Examples()
    for shard in shards:
        examples.note(Place(shard, ""))
    return examples


def _odd_fields(tally: DatasetTally) -> Iterator[Oddity]:
    """Yields the fields that some samples lack, those of more than half of the samples first."""
    sets = tally.field_sets.table()
    rare = 0
    spelled: defaultdict[str, set[str]] = defaultdict(set)
    for name, field in sorted(tally.fields.items(), key=lambda item: -len(item[1].sizes)):
        spelled[name.casefold()].add(name)
        has = len(field.sizes)
        lacks = tally.samples - has
        if not lacks:
            continue
        is_usual = has >= lacks
        rare += not is_usual
        if rare > _MOST_RARE and not is_usual:
            continue
        examples = Examples()
        for fields, _, shard, key in sorted(sets, key=itemgetter(2, 3)):
            if (name in fields) != is_usual:
                examples.note(Place(shard, key))
        if is_usual:
            text = f"{name} is missing in {lacks:,} of {counted(tally.samples, 'sample')}"
            yield Oddity("missing-field", text, lacks, examples)
        else:
            yield Oddity("rare-field", f"{name} is in {has:,} of {counted(tally.samples, 'sample')}", has, examples)
    if rare > _MOST_RARE:
        more = counted(rare - _MOST_RARE, "more field is", "more fields are")
        yield Oddity("rare-fields", f"{more} in fewer than half of the samples", rare - _MOST_RARE)
    for names in spelled.values():
        if len(names) > 1:
            yield Oddity("field-case", f"fields differ only by case: {', '.join(sorted(names))}", len(names))


def _odd_members(tally: DatasetTally) -> Iterator[Oddity]:
    for name, field in tally.fields.items():
        if field.empty:
            text = f"{counted(field.empty, 'sample has', 'samples have')} an empty {name} (0 bytes)"
            yield Oddity("empty-member", text, field.empty, field.empties)
        if field.images is not None and field.images.failed:
            failed = field.images.failed
            text = f"{counted(failed, 'header', 'headers')} of {name} cannot be read: {field.images.failures.reason}"
            yield Oddity("unreadable-image", text, failed, field.images.failures)


def _odd_keys(tally: DatasetTally, places: Places) -> Iterator[Oddity]:
    exact, folded = joined_keys(tally.keys)
    again = find_repeats(exact, places)
    if again.repeated:
        text = f"{counted(again.repeated, 'sample has', 'samples have')} the key of an earlier one"
        yield Oddity("repeated-key", text, again.repeated, _first(again.examples))
    if folded is not None:
        alike = find_repeats(folded, places, exact)
        if alike.samples:
            text = f"the keys of {counted(alike.samples, 'sample')} differ only by case from another's"
            yield Oddity("key-case", text, alike.samples, _first(alike.examples))
    reasons: Counter[str] = Counter()
    examples: defaultdict[str, Examples] = defaultdict(Examples)
    for keys in tally.keys:
        reasons.update(keys.odd)
        for reason, found in keys.examples.items():
            examples[reason].update(found)
    for reason, count in sorted(reasons.items()):
        yield Oddity(reason, counted(count, *_REASONS[reason]), count, examples[reason])
    if unsorted := sum(keys.unsorted > 0 for keys in tally.keys):
        text = f"{counted(unsorted, 'shard is', 'shards are')} not sorted by key"
        yield Oddity("unsorted", text, unsorted, examples[UNSORTED])


def _first(groups: Sequence[tuple[int, list[Place]]]) -> list[Place]:
    return list(groups[0][1]) if groups else []
