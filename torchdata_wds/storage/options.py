"""Options for storage backends, kept so that no message, log or traceback shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdata_wds.storage.rewriting import RewriteRules

__all__ = ["StorageOptions"]


class StorageOptions(Mapping[str, Mapping[str, Any]]):
    """Holds ``{"s3": {"key": ...}, ...}`` read-only and picklable; its repr shows names only.

    Args:
        options: A mapping from protocol to that protocol's options, another holder, or None for no options.
        rewrite: Rules that send URLs elsewhere, as `RewriteRules` takes them; None are those of the other holder.

    Attributes:
        rewrite: The rules, to be tried before the environment's.

    Raises:
        TypeError: if it is not a mapping of mappings, or the rules are neither text nor a mapping.
        ValueError: if a rule is malformed.

    Example:
        >>> StorageOptions({"s3": {"key": "AKIA", "anon": False}})
        StorageOptions(s3={key=***, anon=***})
    """

    __slots__ = ("_options", "rewrite")

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    ) -> None:
        given = options.rewrite if rewrite is None and isinstance(options, StorageOptions) else rewrite
        self.rewrite: RewriteRules = RewriteRules(given)
        self._options: dict[str, dict[str, Any]] = {
            protocol: dict(chosen) for protocol, chosen in _checked(options).items()
        }

    def __getitem__(self, protocol: str) -> dict[str, Any]:
        return dict(self._options[protocol])

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        shown = [f"{protocol}={{{', '.join(f'{name}=***' for name in self[protocol])}}}" for protocol in self]
        shown += [f"rewrite={self.rewrite!r}"] if self.rewrite else []
        return f"StorageOptions({', '.join(shown)})"

    def __hash__(self) -> int:
        return hash(tuple(sorted(self._options)))

    def __reduce__(self) -> tuple[Callable[..., StorageOptions], tuple[dict[str, dict[str, Any]], RewriteRules]]:
        return _restored, (self._options, self.rewrite)


def _restored(options: dict[str, dict[str, Any]], rewrite: RewriteRules) -> StorageOptions:
    return StorageOptions(options, rewrite=rewrite)


def _checked(options: object) -> Mapping[str, Mapping[str, Any]]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(_complaint(f"a {type(options).__name__}"))
    for protocol, chosen in options.items():
        if not isinstance(protocol, str) or not isinstance(chosen, Mapping):
            # Only types are named: the values may be secrets.
            what = protocol if isinstance(protocol, str) else type(protocol).__name__
            raise TypeError(_complaint(f"{what!r}: a {type(chosen).__name__}"))
    return options


def _complaint(found: str) -> str:
    return (
        'storage_options must map a protocol to a mapping of its options, such as {"s3": {"anon": True}} '
        f'or {{"https": {{"headers": {{...}}}}}}; found {found}'
    )
