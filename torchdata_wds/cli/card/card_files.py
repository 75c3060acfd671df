"""Files of a card: compared with those that exist, and written."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torchdata_wds.cli.outputs import write_whole
from torchdata_wds.errors import WdsError

_PIECE = 1 << 20
RIGHT, MISSING, STALE = "right", "missing", "stale"


class CardFile(NamedTuple):
    """A file as it should be.

    Attributes:
        name: Its name in messages.
        path: Where it goes.
        content: What it contains, or a file of the same content, which may be large.
        merges: Whether it keeps what an older version of it had, so that it may replace that.
        equals: Compares another file with it, where equal bytes are too much to ask.
    """

    name: str
    path: Path
    content: bytes | Path
    merges: bool = False
    equals: Callable[[Path], bool] | None = None

    def state(self) -> str:
        """Compares it with the file that exists."""
        if not self.path.exists():
            return MISSING
        is_same = self.path.read_bytes() == self.content if self.equals is None else self.equals(self.path)
        return RIGHT if is_same else STALE

    def save(self) -> None:
        """Writes it in place of one that exists."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._pieces(), str(self.path), overwrite=True)

    def _pieces(self) -> Iterator[bytes]:
        if isinstance(self.content, bytes):
            yield self.content
            return
        with self.content.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


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
        file.save()
    return len(changed)
