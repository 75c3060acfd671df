"""Options for storage backends, kept so that no message, log, traceback or checkpoint shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torchdata_wds.storage.rewriting import RewriteRules
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.secrets.withheld import Withheld

#: Options whose values are texts that pickles may show, unless they hold a password.
_OPEN_NAMES = frozenset({"account_name", "endpoint_url", "profile", "project", "region_name"})


class StorageOptions(Mapping[str, Mapping[str, Any]]):
    """Holds ``{"s3": {"key": ...}, ...}`` read-only and picklable; its repr shows names only.

    A pickle that does not start a process holds no values except numbers and a few texts such as ``endpoint_url``.
    Another process that reads it uses the options of the same names that were made there.

    Args:
        options: A mapping from protocol to that protocol's options, another holder, or None for no options.
        rewrite: Rules that send URLs elsewhere, as `RewriteRules` takes them; None keeps those of the other holder.

    Attributes:
        rewrite: The rules, tried before the environment's.

    Raises:
        TypeError: if it is not a mapping of mappings, or the rules are neither text nor a mapping.
        ValueError: if a rule is malformed.
        ShardOpenError: when it is used, if it came in a pickle and this process has no options of its names.

    Example:
        >>> StorageOptions({"s3": {"key": "AKIA", "anon": False}})
        StorageOptions(s3={key=***, anon=***})
    """

    __slots__ = ("_held", "rewrite")

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    ) -> None:
        given_rules = options.rewrite if rewrite is None and isinstance(options, StorageOptions) else rewrite
        self.rewrite: RewriteRules = RewriteRules(given_rules)
        if isinstance(options, StorageOptions):
            self._held: Withheld[dict[str, dict[str, Any]]] = options._held
            return
        given = {protocol: dict(chosen) for protocol, chosen in _checked(options).items()}
        names = tuple((protocol, *chosen) for protocol, chosen in given.items())
        is_open = all(_is_open(*option) for chosen in given.values() for option in chosen.items())
        self._held = Withheld("storage_options", names, given, is_secret=not is_open)

    @property
    def _names(self) -> tuple[tuple[str, ...], ...]:
        return self._held.names  # type: ignore[return-value]

    def __getitem__(self, protocol: str) -> dict[str, Any]:
        if protocol not in self:
            raise KeyError(protocol)
        return dict(self._held.value[protocol])

    def __contains__(self, protocol: object) -> bool:
        return any(protocol == name for name, *_ in self._names)

    def __iter__(self) -> Iterator[str]:
        return (protocol for protocol, *_ in self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        shown = [f"{protocol}={{{', '.join(f'{name}=***' for name in names)}}}" for protocol, *names in self._names]
        shown += [f"rewrite={self.rewrite!r}"] if self.rewrite else []
        return f"StorageOptions({', '.join(shown)})"

    def __hash__(self) -> int:
        return hash(tuple(sorted(self)))


def _is_open(name: str, value: Any) -> bool:
    """Whether a pickle that goes anywhere may hold an option."""
    if isinstance(value, str):
        return name in _OPEN_NAMES and mask_text(value) == value
    return value is None or isinstance(value, (bool, int, float))


def _checked(options: object) -> Mapping[str, Mapping[str, Any]]:
    found = "" if options is None or isinstance(options, Mapping) else f"a {type(options).__name__}"
    for protocol, chosen in options.items() if isinstance(options, Mapping) else ():
        if not isinstance(protocol, str) or not isinstance(chosen, Mapping):
            # Only types are named: the values may be secrets.
            what = protocol if isinstance(protocol, str) else type(protocol).__name__
            found = f"{what!r}: a {type(chosen).__name__}"
            break
    if found:
        raise TypeError(
            'storage_options must map a protocol to a mapping of its options, such as {"s3": {"anon": True}} '
            f'or {{"https": {{"headers": {{...}}}}}}; found {found}'
        )
    return options if isinstance(options, Mapping) else {}
