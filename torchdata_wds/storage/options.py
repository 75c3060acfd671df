"""Options for storage backends, kept so that no message, log, traceback or checkpoint shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchdata_wds.storage.rewriting import RewriteRules
from torchdata_wds.storage.secrets.masking import mask_text
from torchdata_wds.storage.secrets.pickles import Withheld, is_starting_a_process

__all__ = ["StorageOptions"]


#: Options whose values are texts that pickles may show, unless they hold a password.
_OPEN_NAMES = frozenset({"account_name", "endpoint_url", "profile", "project", "region_name"})

Options = dict[str, dict[str, Any]]

_withheld: Withheld[Options] = Withheld("storage_options")


class StorageOptions(Mapping[str, Mapping[str, Any]]):
    """Holds ``{"s3": {"key": ...}, ...}`` read-only and picklable; its repr shows names only.

    A pickle that does not go to a process which is being started holds no values but numbers and a few texts such as
    ``endpoint_url``. Read in another process, it takes the others from the options of the same names that were made
    there.

    Args:
        options: A mapping from protocol to that protocol's options, another holder, or None for no options.
        rewrite: Rules that send URLs elsewhere, as `RewriteRules` takes them; None are those of the other holder.

    Attributes:
        rewrite: The rules, to be tried before the environment's.

    Raises:
        TypeError: if it is not a mapping of mappings, or the rules are neither text nor a mapping.
        ValueError: if a rule is malformed.
        ShardOpenError: when it is used, if it came by a pickle and this process has no options of its names.

    Example:
        >>> StorageOptions({"s3": {"key": "AKIA", "anon": False}})
        StorageOptions(s3={key=***, anon=***})
    """

    __slots__ = ("_given", "_mark", "_names", "rewrite")

    _given: Options | None
    _mark: str
    _names: tuple[tuple[str, ...], ...]

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        rewrite: str | Mapping[str, str] | RewriteRules | None = None,
    ) -> None:
        given = options.rewrite if rewrite is None and isinstance(options, StorageOptions) else rewrite
        self.rewrite: RewriteRules = RewriteRules(given)
        if isinstance(options, StorageOptions):
            self._given, self._mark, self._names = options._given, options._mark, options._names
            return
        self._given = {protocol: dict(chosen) for protocol, chosen in _checked(options).items()}
        self._names = tuple((protocol, *chosen) for protocol, chosen in self._given.items())
        is_open = all(_is_open(*option) for chosen in self._given.values() for option in chosen.items())
        self._mark = "" if is_open else _withheld.add(self._names, self._given)

    @property
    def _options(self) -> Options:
        return _withheld.find(self._mark, self._names) if self._given is None else self._given

    def __getitem__(self, protocol: str) -> dict[str, Any]:
        if protocol not in self:
            raise KeyError(protocol)
        return dict(self._options[protocol])

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

    def __reduce__(self) -> tuple[Callable[..., StorageOptions], tuple[Any, ...]]:
        goes_along = not self._mark or is_starting_a_process()
        return _restored, (self._options if goes_along else None, self._mark, self._names, self.rewrite)


def _restored(
    options: Options | None, mark: str, names: tuple[tuple[str, ...], ...], rewrite: RewriteRules
) -> StorageOptions:
    if options is not None:
        return StorageOptions(options, rewrite=rewrite)
    made = StorageOptions(rewrite=rewrite)
    made._given, made._mark, made._names = _withheld.known(mark), mark, names
    return made


def _is_open(name: str, value: Any) -> bool:
    """Whether an option may stand in a pickle that goes anywhere."""
    if isinstance(value, str):
        return name in _OPEN_NAMES and mask_text(value) == value
    return value is None or isinstance(value, (bool, int, float))


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
