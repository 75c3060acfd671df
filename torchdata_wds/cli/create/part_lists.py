"""What samples can be made of: finds out what a source is, and opens it."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any, Literal

from torchdata_wds.cli.create.assembling import PartList
from torchdata_wds.cli.create.folders import SampleFolder
from torchdata_wds.cli.create.plans import Plan
from torchdata_wds.cli.create.recipes import Recipe
from torchdata_wds.cli.printing import printable
from torchdata_wds.errors import SpecError
from torchdata_wds.format.dataset_files.trust import folder_of
from torchdata_wds.storage import compression_for, mask_url, open_shard
from torchdata_wds.storage.urls import local_path, scheme_of

__all__ = ["SourceKind", "kind_of", "open_part_list"]


SourceKind = Literal["folder", "recipe", "plan"]

_DELIMITERS = {".tsv": "\t", ".csv": ","}


def kind_of(source: str) -> SourceKind:
    """Tells what a source is: a folder, by its suffix a plan, or else a recipe.

    Args:
        source: A path or URL.

    Example:
        >>> kind_of("s3://bucket/plan.csv.gz"), kind_of("-"), kind_of(".")
        ('plan', 'recipe', 'folder')
    """
    if _is_folder(source):
        return "folder"
    return "plan" if _suffix(source) in _DELIMITERS else "recipe"


def open_part_list(
    source: str,
    kind: SourceKind | None = None,
    *,
    folder: str | None = None,
    sort: bool = False,
    allow_pipe: bool = False,
    **options: Any,
) -> PartList:
    """Opens a folder, or reads a recipe or plan.

    Args:
        source: A path, ``-`` (standard input) or any other URL; only a path may be a folder.
        kind: What it is; None finds out by `kind_of`.
        folder: What relative paths in a list are relative to; None is the folder of the list, and
            the working directory for one that is no regular file.
        sort: Whether a recipe is sorted by key.
        allow_pipe: Whether a recipe may run commands (``pipe:``), wherever it is from.
        options: Those of `Plan`; its delimiter goes by the suffix.

    Raises:
        SpecError: if the source is not there, or is not what it should be.
        ShardOpenError: if it cannot be read.
        ValueError: if an option is wrong.

    Example:
        >>> open_part_list(".").name
        'folder .'
    """
    if not source:  # as a shell makes of a variable that is not set; to a Path it is the working directory
        raise SpecError("the name of the source is empty")
    kind = kind or kind_of(source)
    if kind == "folder":
        if not _is_folder(source):
            raise SpecError(f"{_shown(source)} is not a folder")
        return SampleFolder(local_path(source))
    data = _read(source, kind)
    base = _folder_of(source) if folder is None else local_path(folder)
    if kind == "recipe":
        return Recipe(data, source, base, sort=sort, trusted=allow_pipe)
    options.setdefault("delimiter", _DELIMITERS.get(_suffix(source), "\t"))
    return Plan(data, source, base, **options)


def _is_folder(source: str) -> bool:
    return scheme_of(source) in ("", "file") and Path(local_path(source)).is_dir()


def _folder_of(source: str) -> str:
    # a FIFO, as a shell makes for <(command), lies nowhere
    if scheme_of(source) in ("", "file") and not Path(local_path(source)).is_file():
        return ""
    return folder_of(source)


def _read(source: str, kind: str) -> bytes:
    if scheme_of(source) in ("", "file"):
        path = Path(local_path(source))
        if path.is_dir():
            raise SpecError(f"{_shown(source)} is a folder, and no {kind}")
        if not path.exists():
            raise SpecError(f"there is no {kind} {_shown(source)}, and no folder of that name")
    with open_shard(source) as stream:
        return stream.read()


def _shown(source: str) -> str:
    return printable(mask_url(source))


def _suffix(source: str) -> str:
    """The suffix in small letters, without that of a compression."""
    path = PurePosixPath(source.partition("?")[0] if scheme_of(source) not in ("", "file") else source)
    if compression_for(path.name, None):
        path = path.with_suffix("")
    return path.suffix.lower()
