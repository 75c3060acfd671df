"""A function over shards, shard by shard: each output appears whole, under its name, when its function has returned.

A local output is made in a temporary folder beside its place and then renamed, so that one that exists is finished, and
work that was broken off goes on where it was.
"""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torchdata_wds.cli.printing import printable, shorten
from torchdata_wds.format.index import index_url
from torchdata_wds.storage import list_targets, mask_url
from torchdata_wds.storage.places import resolve
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.targets.base import sync_file, sync_folder
from torchdata_wds.storage.urls import local_path

ShardFunction = Callable[[str, str], Any]
_SHOWN_LINES = 8
_SHOWN_WIDTH = 1000
_TRAILER = "\nThis exception is thrown by "  # torch adds the pipe with all its arguments
_NOTHING = "the function has returned without writing the file that its second argument names"


class ShardTask(NamedTuple):
    """What is to be done for one shard.

    Attributes:
        source: The input.
        target: The output: an absolute path, or a URL that the function writes itself.
        staging: The folder for what is not finished; None for a URL.
        overwrite: Whether an output that exists is replaced.
    """

    source: str
    target: str
    staging: str | None
    overwrite: bool


def load_function(name: str) -> ShardFunction:
    """Imports a function.

    Args:
        name: As ``module:function``; the module is looked for in ``sys.path``.

    Raises:
        ImportError: if there is no such function, or its module fails.

    Example:
        >>> load_function("shutil:copyfile").__name__
        'copyfile'
    """
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            message = f"there is no module {error.name!r} in the current folder or where Python looks for modules"
        else:
            message = f"the module {module_name!r} fails when it is imported:\n{error_text(error)}"
        raise ImportError(message, name=module_name) from error
    try:
        found = functools.reduce(getattr, path.split("."), found)
    except AttributeError as error:
        raise ImportError(f"the module {module_name!r} has no function {path!r}", name=module_name) from error
    if not callable(found):
        raise ImportError(f"{name} cannot be called: it is {found!r:.60}", name=module_name)  # noqa: TRY004
    return found  # type: ignore[no-any-return]


def existing_targets(targets: Iterable[str]) -> set[str]:
    """Finds out which outputs are there already.

    Args:
        targets: Paths and URLs of any store that can be listed.

    Raises:
        ShardOpenError: if a store cannot be asked.

    Example:
        >>> existing_targets(["no/such.tar"])
        set()
    """
    folders: dict[str, list[tuple[str, str]]] = {}
    for target in targets:
        folder, slash, name = (local_path(target) if _is_local(target) else target).rpartition("/")
        folders.setdefault(folder + slash, []).append((name, target))
    return {
        target
        for folder, found in folders.items()
        for names in [set(list_targets(folder or "."))]
        for name, target in found
        if name in names
    }


@contextmanager
def staged_tasks(pairs: Iterable[tuple[str, str]], *, overwrite: bool = False) -> Iterator[list[ShardTask]]:
    """Makes tasks, with temporary folders beside their outputs for as long as the context is entered.

    Args:
        pairs: Input and output of each. The folders of local outputs are made.
        overwrite: Whether outputs that exist are replaced.

    Raises:
        OSError: if a folder cannot be made.
    """
    tasks = []
    folders: dict[str, str] = {}
    with ExitStack() as stack:
        for source, target in pairs:
            if not _is_local(target):
                tasks.append(ShardTask(source, target, None, overwrite))
                continue
            path = Path(local_path(target)).absolute()
            folder = str(path.parent)
            if folder not in folders:
                path.parent.mkdir(parents=True, exist_ok=True)
                made = tempfile.TemporaryDirectory(prefix=".wds-map-", dir=folder, ignore_cleanup_errors=True)
                folders[folder] = stack.enter_context(made)
            tasks.append(ShardTask(source, str(path), folders[folder], overwrite))
        yield tasks


def _is_local(url: str) -> bool:
    """Whether a name is that of a local file, and no rewriting rule puts it elsewhere."""
    place = resolve(url)
    return place.is_local and not place.is_moved


def absolute(task: ShardTask) -> ShardTask:
    """Gives a task that can be done from any working directory."""
    return task._replace(source=os.path.abspath(local_path(task.source))) if _is_local(task.source) else task  # noqa: PTH100 - a str


def run_task(
    load: Callable[[], ShardFunction], task: ShardTask, explain: Callable[[BaseException], str] | None = None
) -> str:
    """Does the work for one shard.

    Args:
        load: Gives the function. It is called with the input and the name of a file to write, whose base name is that
            of the output; files beside it whose names begin with that and a dot, such as an index, go with it.
        task: The work.
        explain: Says what an exception means; None takes the last lines of its traceback.

    Returns:
        "", or what has failed.

    Example:
        >>> import shutil
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "x.tar").write_bytes(b"some")
        >>> with staged_tasks([(str(folder / "x.tar"), str(folder / "out/x.tar"))]) as tasks:
        ...     run_task(lambda: shutil.copyfile, tasks[0])
        ''
        >>> [path.name for path in (folder / "out").iterdir()]
        ['x.tar']
    """
    try:
        if task.staging is None:
            load()(task.source, task.target)
            return "" if existing_targets([task.target]) else f"{_NOTHING}: {mask_url(task.target)} is not there"
        if obstacle := _obstacle(task):
            return obstacle
        with tempfile.TemporaryDirectory(dir=task.staging, ignore_cleanup_errors=True) as folder:
            made = Path(folder, Path(task.target).name)
            load()(task.source, str(made))
            return _published(made, task)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the function raises, asyncio's CancelledError too
        return (explain or error_text)(error)


def _obstacle(task: ShardTask) -> str:
    """Why an output cannot have its name."""
    target = Path(task.target)
    if target.is_dir():
        return f"{task.target!r} is a folder"
    if task.overwrite or not os.path.lexists(target):
        return ""
    if not target.exists():
        return f"{task.target!r} is a symbolic link that leads nowhere"
    return f"{task.target!r} has come into existence meanwhile, by another program; it is left as it is"


def _published(made: Path, task: ShardTask) -> str:
    """Gives what was made its name, or says why not. The output comes last: where it is, all is."""
    if made.is_symlink() or not made.is_file():
        others = sorted(path.name for path in made.parent.iterdir())
        found = f"it wrote {', '.join(map(repr, others[:3]))} instead" if others else "it wrote nothing there"
        return f"{_NOTHING}: {found}"
    if obstacle := _obstacle(task):
        return obstacle
    target = Path(task.target)
    Path(index_url(task.target)).unlink(missing_ok=True)  # that of an older output would lead nowhere
    companions = [path for path in made.parent.iterdir() if path.name.startswith(made.name + ".") and path.is_file()]
    for path in (*sorted(companions), made):
        with path.open("rb") as file:
            sync_file(file.fileno())
        path.replace(target.with_name(path.name))
    sync_folder(target.parent)
    return ""


def error_text(error: BaseException) -> str:
    """The last lines of an exception's traceback, masked and made harmless for a terminal.

    Example:
        >>> error_text(ValueError("token=abc is wrong"))
        'ValueError: token=*** is wrong'
    """
    text = "".join(traceback.format_exception(error)).partition(_TRAILER)[0].rstrip()
    lines = [line for line in text.splitlines() if line.strip("^~ ")]
    return "\n".join(map(_shown, lines[-_SHOWN_LINES:]))


def _shown(line: str) -> str:
    # cut before, or it would take long, and behind, lest the cut takes away what a secret is known by
    return shorten(printable(mask_text(line[: 4 * _SHOWN_WIDTH])), _SHOWN_WIDTH)
