"""Functions that a user names: of a shard, or of one sample at a time."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds.cli.map.shard_tasks import ShardFunction, error_text
from torchdata_wds.errors import SampleError
from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.storage import mask_url
from torchdata_wds.writers.tar_writer import TarWriter


def load_function(name: str) -> ShardFunction:
    """Imports a function named ``module:function``; an ImportError if there is none, or its module fails.

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


def load_sample_function(name: str) -> ShardFunction:
    """Imports a function of a sample as one of a shard: see `load_function` and `over_samples`."""
    function: Callable[..., Any] = load_function(name)
    return functools.partial(over_samples, function)


def over_samples(function: Callable[[dict[str, Any]], Any], source: str, target: str) -> None:
    """Writes a shard of what a function makes of each sample of another, in their order.

    The function returns a sample, None to leave it out, or any number of samples; values that are not bytes are encoded
    by their field.
    """
    samples = KeyGrouperIterDataPipe(ShardLoaderIterDataPipe(IterableWrapper([source], deepcopy=False)))
    with TarWriter(target) as writer, closing(iter(samples)) as given:  # type: ignore[type-var]
        for sample in given:
            key = sample["__key__"]  # the function may change its sample
            for made in _made(function(sample), key, source):
                writer.write(made)


def _made(answer: Any, key: str, source: str) -> Iterable[Mapping[str, Any]]:
    if answer is None:
        return ()
    if isinstance(answer, Mapping):
        return (answer,)
    if isinstance(answer, Iterable) and not isinstance(answer, (str, bytes)):
        return answer
    shard = mask_url(source)
    raise SampleError(
        f"the function has returned {answer!r:.60} for sample {key!r} of shard {shard}: it must return a sample (a "
        "dict), None to leave it out, or a list of samples",
        shard=shard,
        key=key,
    )
