"""Files of a card: compared with those that exist, and written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torchdata_wds.cli.outputs import write_whole
from torchdata_wds.errors import WdsError

RIGHT, MISSING, STALE = "right", "missing", "stale"


class CardFile(NamedTuple):
    """A file as it should be; one that merges (the README) may replace an older version of itself."""

    name: str
    path: Path
    content: bytes
    merges: bool = False
    same: Callable[[bytes, bytes], bool] = bytes.__eq__

    def state(self) -> str:
        """Compares it with the file that exists."""
        if not self.path.exists():
            return MISSING
        return RIGHT if self.same(self.path.read_bytes(), self.content) else STALE


def save_all(files: Sequence[CardFile], *, overwrite: bool) -> int:
    """Writes the files that do not exist or differ, or none of them; returns how many.

    Raises:
        WdsError: if one differs and may not be replaced.
    """
    states = [file.state() for file in files]
    refused = [file.name for file, state in zip(files, states, strict=True) if state == STALE and not file.merges]
    if refused and not overwrite:
        raise WdsError(f"nothing is written: there is another {', another '.join(refused)}. Pass --force to replace it")
    changed = [file for file, state in zip(files, states, strict=True) if state != RIGHT]
    for file in changed:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole([file.content], str(file.path), overwrite=True)
    return len(changed)
