"""A function of one sample at a time, as a function over shards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from typing import Any

from torch.utils.data.datapipes.iter import IterableWrapper

from torchdata_wds.cli.map.shard_tasks import ShardFunction, load_function
from torchdata_wds.errors import SampleError
from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe
from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe
from torchdata_wds.storage import mask_url
from torchdata_wds.writers.tar_writer import TarWriter


def load_sample_function(name: str) -> ShardFunction:
    """Imports a function of a sample as one over a shard: see `load_function` and `over_samples`.

    Raises:
        ImportError: if there is no such function, or its module fails.
    """
    function: Callable[..., Any] = load_function(name)
    return functools.partial(over_samples, function)


def over_samples(function: Callable[[dict[str, Any]], Any], source: str, target: str) -> None:
    """Writes a shard of what a function makes of each sample of another, in their order.

    Args:
        function: It is given a sample, with ``__key__``, ``__url__`` and bytes by field. It returns a sample, None to
            leave it out, or any number of samples; values that are not bytes are encoded by their field.
        source: The shard to read.
        target: The shard to write.

    Raises:
        SampleError: if it returns something else, or a sample that cannot be written.
        ShardFormatError: if the shard is damaged.
        ShardOpenError: if one of them cannot be opened.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> with TarWriter(folder / "x.tar") as writer:
        ...     _ = [writer.write({"__key__": str(number), "cls": number}) for number in range(3)]
        >>> def even(sample):
        ...     return sample if int(sample["cls"]) % 2 == 0 else None
        >>> over_samples(even, str(folder / "x.tar"), str(folder / "y.tar"))
        >>> import torchdata_wds
        >>> [sample["__key__"] for sample in torchdata_wds.WebDataset(folder / "y.tar")]
        ['0', '2']
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
