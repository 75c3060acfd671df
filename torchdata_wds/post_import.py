"""Runs an action once a module has been imported, without importing it: torch takes seconds, and few commands need it.

A finder before all others lets those find the module, and replaces its loader by one that runs the action after the
module's code, before the import returns. So no code can see the module without what the action adds to it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def when_imported(name: str, action: Callable[[], object]) -> None:
    """Calls `action` now if the module has been imported, else at the end of its import; the last action counts."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if getattr(finder, "awaits", None) != name]
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    # Another thread may be importing the module. If its package has begun before the line above, the imports below wait
    # for that thread; if not, the thread will find the finder. Packages come first: an import of the module alone would
    # hold it while it waits for its package, which may wait for the module.
    names = name.split(".")
    if sys.modules.get(names[0]) is not None:
        for count in range(1, len(names) + 1):
            importlib.import_module(".".join(names[:count]))
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
            action()


class _Finder:
    """Finds one module, by the other finders."""

    def __init__(self, name: str, action: Callable[[], object]) -> None:
        self.awaits, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.awaits:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            if find is not None and (spec := find(fullname, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec  # type: ignore[no-any-return]
        return None


class _Loader:
    """Loads a module by its own loader, and then runs the action of a finder."""

    def __init__(self, own: Any, finder: _Finder) -> None:
        self._own, self._finder = own, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        if self._finder in sys.meta_path:  # else another import of it, or a newer finder, has taken over
            self._finder.action()
            sys.meta_path.remove(self._finder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
