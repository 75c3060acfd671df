"""What only the owner of a data set knows: by the options, or else by the files of an earlier card."""

import json
from contextlib import suppress
from typing import NamedTuple

from torchdata_wds.cli.card.front_matter import divide, scalar_of


class Answers(NamedTuple):
    """What was said of a data set; None and () where nobody said it."""

    title: str | None = None
    license: str | None = None
    description: str | None = None
    url: str | None = None
    tasks: tuple[str, ...] = ()
    languages: tuple[str, ...] = ()

    def or_else(self, others: "Answers") -> "Answers":
        """Returns these answers, with the others where there is none."""
        return others._replace(**{name: value for name, value in self._asdict().items() if value})


def recorded_answers(readme: str | None, croissant: bytes | None) -> Answers:
    """Returns what an earlier card says; the README alone decides about the license if there is one."""
    found: dict[str, str] = {}
    with suppress(ValueError, RecursionError, AttributeError):
        found = {key: value for key, value in json.loads(croissant or b"{}").items() if isinstance(value, str)}
    entries = [] if readme is None else divide(readme)[0]
    return Answers(
        scalar_of(entries, "pretty_name") or found.get("name"),
        found.get("license") if readme is None else scalar_of(entries, "license"),
        found.get("description"),
        found.get("url"),
    )
