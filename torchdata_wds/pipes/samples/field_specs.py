"""Field specs: ``"jpg;png"`` is the first of jpg and png that the sample has."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchdata_wds.errors import Advice, MissingFieldError
from torchdata_wds.handlers import warn_once
from torchdata_wds.option_types import Spec
from torchdata_wds.storage import mask_url

#: After this many samples without a field a warning is logged: the stream may be endless.
ENOUGH_SAMPLES = 10_000


def alternatives(spec: Spec) -> tuple[str, ...]:
    """Splits a spec into its alternatives; raises ValueError if it is empty, not a str, or a str with blanks."""
    if isinstance(spec, str):
        names = tuple(name.strip() for name in spec.split(";"))
        is_one = not any(blank in name for name in names for blank in " \t\n")
    else:
        names, is_one = tuple(spec) if isinstance(spec, (list, tuple)) else (), True
    if not is_one or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"a field spec is a name or alternatives like 'jpg;png', not {spec!r}; a name with blanks goes into a list"
        )
    return names


def expect_sample(item: Any, stage: str) -> dict[str, Any]:
    """Returns the item if it is a sample; otherwise raises a TypeError that names the stage and the item."""
    if isinstance(item, dict):
        return item
    raise TypeError(
        f"{stage} got {type(item).__name__} {str(item)[:80]!r}; it takes samples (dict by field), as .group_by_key() "
        "yields them, and comes before .wds_to_tuple()"
    )


def find_field(sample: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Returns the first of the names that the sample has, None if it has none of them."""
    return next((name for name in names if name in sample), None)


def name_sample(sample: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a sample's name for a message ("sample 'a' of shard x.tar"), and its place as an exception's keywords."""
    key, url = sample.get("__key__"), sample.get("__url__")
    shard = None if url is None else mask_url(str(url))
    name = ("a sample" if key is None else f"sample {key!r}") + ("" if shard is None else f" of shard {shard}")
    return name, {"shard": shard, "key": key}


def missing_field(sample: Mapping[str, Any], names: Sequence[str]) -> MissingFieldError:
    """Returns the error for a sample without any of the names: it lists the fields, and explains dots in names."""
    there = [field for field in sample if not field.startswith("__")]
    name, place = name_sample(sample)
    message = f"{name} has no field {' or '.join(map(repr, names))}; it has {there}."
    dotted = next((field for field in there if field.endswith(tuple("." + wanted for wanted in names))), None)
    advice: Advice | str = ""
    if dotted is not None:
        message += f" Its file names have more than one dot (field {dotted!r}):"
        advice = Advice.of(
            "ask for that field, or split names at their last dot with {}.",
            "group_by_key(keys='last_dot')",
            "--keys last_dot",
        )
    return MissingFieldError(message, **place, field=";".join(names), advice=advice)


def noting_absent(samples: Iterable[Any], named: Mapping[str, Callable[[Any], bool | None]]) -> Iterator[Any]:
    """Passes samples through; warns about optional fields of a stage that no sample has.

    `named` maps a description, such as ``"stage(option) names 'jpg'"``, to a function that returns whether a sample has
    the field, or None if it need not.
    """
    # A field is removed once a sample has it, so that nothing is checked when all have been seen.
    absent = dict.fromkeys(named, 0)
    for sample in samples:
        for name in [*absent]:
            if found := named[name](sample):
                del absent[name]
            elif found is not None:
                absent[name] += 1
                if absent[name] == ENOUGH_SAMPLES:
                    _warn_of_absent(name, ENOUGH_SAMPLES)
        yield sample
    for name, count in absent.items():
        _warn_of_absent(name, count)


def _warn_of_absent(name: str, count: int) -> None:
    if count:
        warn_once(name, f"{name}, which none of {count:,} samples has. `wds ls SHARD` shows the fields of a shard")
