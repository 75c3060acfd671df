"""The types of options, as used in several packages and shown to type checkers for the functional forms."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

#: A function from URL to a path inside the cache folder, "basename", "path" or "unsigned", or None for the default.
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

#: Names of fields in order of preference: a list, or one str with semicolons.
Spec = str | Sequence[str]

#: When a mix of several sources ends.
Stop = Literal["first", "all", "cycle"]
