"""The types of options that several floors take, and that type checkers see of the functional forms."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

#: A function of a URL that gives a path inside the cache's folder, one of the words below, or None for the default.
Naming = str | Callable[[str], "str | os.PathLike[str]"] | None
Select = str | Iterable[str] | Callable[[str], bool]
SplitName = Callable[[str], "tuple[str, str] | None"]
KeyRule = Literal["first_dot", "last_dot"] | SplitName
OnDuplicate = Literal["error", "first", "last"]
OnReappearing = Literal["error", "warn", "allow"]
Layout = Literal["auto", "members", "dash", "base64", "obelics"]
Even = Literal["drop", "pad"] | None
Index = bool | str | os.PathLike[str] | Mapping[Any, int] | None
Missing = Literal["error", "drop_image", "skip_sample", "none"]
StartShard = int | Literal["next"]

#: Names of fields, by preference: a list, or one text with semicolons.
Spec = str | Sequence[str]

#: When a mix of several sources ends.
Stop = Literal["first", "all", "cycle"]
