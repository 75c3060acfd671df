"""Handles names of forms whose pipes are not imported yet, and of forms that are not registered.

The latter are WebDataset's names, which differ here, and torchdata's before its import. Python looks up missing
attributes in ``__getattr__`` of torch's pipes, for native ones too; `install` adds a lookup before torch's own. A name
of WebDataset still raises an AttributeError (``hasattr`` is False), which says what to write here. The first use of a
name of torchdata imports torchdata, which registers its forms.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torchdata_wds.handlers import warn_once

if TYPE_CHECKING:
    from torch.utils.data import IterDataPipe, MapDataPipe

#: WebDataset's names that are forms here with the prefix ``wds_``.
SHORTER = ("compose", "decode", "extract_keys", "map_dict", "map_tuple", "rename", "rename_keys", "to_tuple")

#: Methods of WebDataset, releases 0.1 to 1.0, that have another name here.
METHODS = {
    "append": "a pipe never changes: chain a form instead, as pipe = pipe.wds_map(f)",
    "associate": "write .wds_map(f), where f adds what belongs to the sample",
    "batched": "write .batch(n).collate(wds_collate); partial=False is .batch(n, drop_last=True)",
    "cache": "write .cache_shards(folder) before .load_wds_shards(), or .cache_samples(file)",
    "cached": "write .in_memory_cache(), or .cache_samples(file)",
    "close": "no file stays open outside an iteration; the workers end with loader.shutdown()",
    "dbcache": "write .cache_samples(file, max_samples=n)",
    "ddp_equalize": 'write .wds_epoch(n), or .split_shards(index=True, even="pad") in place of .sharding_filter()',
    "detshuffle": "write .wds_shuffle(n), and give the loader a seed: WorkersReadingService(n, seed=s)",
    "dict2tuple": 'write .wds_to_tuple("jpg;png", "cls")',
    "getfirst": 'write .wds_to_tuple("jpg;png")',
    "info": "write .wds_map(f), where f prints the sample and returns it",
    "iterator": "write iter(pipe)",
    "listed": "write .batch(n)",
    "lmdb_cached": "write .cache_samples(file, max_samples=n)",
    "log_keys": "write .wds_map(f), where f logs the key and returns the sample",
    "mcached": "write .in_memory_cache(), or .cache_samples(file)",
    "nbatches": "write .set_length(n), or WdsLoader(pipe, length=n)",
    "parallel": "write WdsLoader(pipe, num_workers=n) around the pipe",
    "pipe": "write .wds_compose(f, *args)",
    "repeatedly": "write .wds_epoch(n) for epochs of n items, or .cycle(n) for n passes",
    "resampled": "write .resample_shards() in place of .sharding_filter(), or WebDataset(urls, resampled=True)",
    "rsample": "write .filter(f), where f draws a random number",
    "select": "write .filter(f)",
    "split_by_node": "write .sharding_filter(), and run it with WorkersReadingService(n, distributed=True)",
    "split_by_worker": "write .sharding_filter()",
    "stage": "write repr(pipe) to see the stages",
    "tarfile_to_samples": "write .load_wds_shards().group_by_key()",
    "then": "write .wds_compose(f, *args)",
    "tuple2dict": "write .map(f), where f makes the dict",
    "unbatched": "write .wds_unbatch()",
    "unlisted": "write .unbatch()",
    "with_epoch": "write .wds_epoch(n), which counts over all workers and ranks together",
    "with_length": "write .set_length(n), or WdsLoader(pipe, length=n)",
    "xdecode": 'write .wds_decode(handle_extension("left.png", f), only="left.png")',
}

#: Names that WebDataset's package exports, besides functions that are also methods.
EXPORTS = {
    "Continue": "a decoder function returns None to pass a field on",
    "DataPipeline": "a pipeline is a chain of forms: IterableWrapper(urls).list_shards()...",
    "Decoder": "write .wds_decode(...)",
    "FluidInterface": "all pipes have the forms",
    "FluidWrapper": "write IterableWrapper(dataset)",
    "Cached": "write .in_memory_cache(), or .cache_samples(file)",
    "LMDBCached": "write .cache_samples(file, max_samples=n)",
    "LRUCleanup": "write .cache_shards(folder, max_bytes=n)",
    "MockDataset": "write IterableWrapper([sample] * n)",
    "MultiShardSample": "write load_dataset(file)",
    "PipelineStage": "write .wds_compose(f), or an IterDataPipe of your own",
    "RandomMix": 'write .wds_mix(*others, weights=[...], stop="first")',
    "ResampledShards": "write .resample_shards()",
    "RoundRobin": 'write .wds_mix(*others, stop="first")',
    "SimpleShardList": "write IterableWrapper(urls).list_shards()",
    "WebLoader": "write WdsLoader(pipe, num_workers=n), DataLoader2 or torch's DataLoader",
    "gopen": "write .load_wds_shards(), which opens URLs itself",
    "gopen_schemes": "another scheme is fsspec.register_implementation(...)",
    "gzfilter": ".wds_decode() decompresses fields itself",
    "imagehandler": 'write .wds_decode("rgb"), or image_decoder("rgb")',
    "non_empty": "a pattern that matches nothing always raises",
    "numpy_dumps": "the writers encode arrays",
    "pipe_cleaner": "samples keep their URL unchanged",
    "pipelinefilter": "write .wds_compose(f, *args)",
    "pytorch_weights_only": "the fields pth and pt are always read with weights only",
    "shardspec": "write load_dataset(file)",
    "single_node_only": "the loader divides the shards among nodes",
    "tarfile_samples": "write .load_wds_shards().group_by_key()",
    "torch_dumps": "the writers encode tensors",
    "torch_loads": "write .wds_decode()",
    "transform_with": "write .wds_map(f)",
}

#: Arguments of WebDataset's methods, by the form that has the method's name or role here.
ARGUMENTS = {
    "batch": {
        "batchsize": "write .batch(n)",
        "collate_fn": "write .batch(n).collate(f)",
        "collation_fn": "write .batch(n).collate(wds_collate), or a function of yours in its place",
        "partial": "partial=False is drop_last=True",
    },
    "filter": {"handler": "the form with a handler is .wds_map(f, handler=...), where f returns None to drop an item"},
    "map": {"handler": "the form with a handler is .wds_map(f, handler=...)"},
    "repeat": {"nbatches": "write .wds_epoch(n)", "nepochs": "write .cycle(n)"},
    "wds_decode": {
        "partial": 'fields without a decoder stay bytes in any case; only="jpg cls" decodes some fields',
        "pre": "decoders are tried in order, and a function that returns None passes: put yours first",
        "post": "decoders are tried in order, and a function that returns None passes: put yours last",
    },
    "wds_epoch": {"nbatches": "write .wds_epoch(n) after .batch()", "nsamples": "write .wds_epoch(n) before .batch()"},
    "wds_shuffle": {
        "bufsize": "write .wds_shuffle(n)",
        "rng": "seeds come from the loader: WorkersReadingService(n, seed=s), or torch.manual_seed(s)",
        "seed": "seeds come from the loader: WorkersReadingService(n, seed=s), or torch.manual_seed(s)",
        "size": "write .wds_shuffle(n)",
    },
    "wds_to_tuple": {"missing_is_error": 'missing_is_error=False is missing="none"'},
}

#: All functional names that torchdata 0.9 registers; a test compares.
TORCHDATA_FORMS = frozenset(
    """
    add_index async_map_batches bucketbatch check_hash cycle dataframe decompress drop end_caching enumerate extract
    flatmap flatten fullsync header in_batch_shuffle in_memory_cache lines_to_paragraphs list_files_by_ais
    list_files_by_fsspec list_files_by_iopath list_files_by_s3 load_files_by_ais load_files_by_s3 load_from_bz2
    load_from_rar load_from_tar load_from_tfrecord load_from_xz load_from_zip load_parquet_as_df map_batches
    max_token_bucketize memory_cell mux_longest on_disk_cache open_files_by_fsspec open_files_by_iopath parse_csv
    parse_csv_as_dict parse_json_files pin_memory prefetch random_split read_from_gdrive read_from_http
    read_from_remote readlines repeat round_robin_demux rows2columnar save_by_fsspec save_by_iopath save_to_disk
    set_length shard_expand sharding_round_robin_dispatch shuffled_flatmap slice threadpool_map to_map_datapipe unzip
    webdataset zip_longest zip_with_iter zip_with_map
    """.split()  # noqa: SIM905  (a list would have a line for each)
)

#: The same of map-style pipes.
TORCHDATA_MAP_FORMS = frozenset(("in_memory_cache", "to_iter_datapipe", "unzip"))

#: What to write if torchdata cannot be imported.
_WITHOUT_TORCHDATA = {
    **dict.fromkeys(("cycle", "repeat"), ".wds_epoch(n) passes over its source again and again"),
    **dict.fromkeys(("header", "slice"), ".wds_compose(itertools.islice, n) takes the first n items"),
    **dict.fromkeys(
        ("open_files_by_fsspec", "read_from_http", "read_from_remote"), ".load_wds_shards() opens URLs itself"
    ),
    "enumerate": ".wds_compose(enumerate) does the same",
    "flatmap": ".map(f).unbatch() does the same if f returns lists",
    "in_memory_cache": ".cache_samples(file) keeps samples in a file",
    "load_from_tar": ".load_wds_shards() reads tar files",
    "prefetch": ".load_wds_shards(read_ahead=n) reads ahead, and so do the workers of a loader",
    "set_length": "WdsLoader(pipe, length=n) has that length",
}

#: Forms of torchdata that share a name with WebDataset's but do something else.
_OTHER_MEANING = {
    "repeat": (
        ".repeat(n) is torchdata's form, which yields each item n times in a row. For n passes over the data write "
        ".cycle(n), for epochs of n items .wds_epoch(n). To repeat each item without this warning write "
        "torchdata.datapipes.iter.Repeater(pipe, n)"
    ),
    "slice": (
        ".slice(...) is torchdata's form, which slices each item and passes all of them. For the first n items write "
        ".wds_compose(itertools.islice, n). To slice each item without this warning write "
        "torchdata.datapipes.iter.Slicer(pipe, ...)"
    ),
}


#: Forms of torch and torchdata whose calls are checked for the arguments of WebDataset's.
_CHECKED = {"batch", "filter", "map", "shuffle", *_OTHER_MEANING}


class LaterForm:
    """A functional form whose pipe is imported when the form is first used, which `register` then puts in its place."""

    def __init__(self, module: str, name: str) -> None:
        self.__module__, self.__qualname__, self.__name__ = module, name, name

    @property
    def __wrapped__(self) -> Any:
        """The class of the pipe, where `inspect` looks for arguments."""
        return getattr(importlib.import_module(self.__module__), self.__qualname__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        """The docstring of the pipe."""
        return self.__wrapped__.__doc__  # type: ignore[no-any-return]

    def __call__(self, source: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Makes the pipe."""
        return self.__wrapped__(source, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<class '{self.__module__}.{self.__qualname__}'>"


def add_forms(forms: Mapping[str, tuple[str, str]]) -> None:
    """Registers forms, given the module and class of each; a RuntimeError if another package has a name."""
    from torch.utils.data import IterDataPipe

    for name, (module, qualname) in forms.items():
        pipe = getattr(sys.modules.get(module), qualname, None)
        if pipe is None or owner_of(name) is not pipe:
            check_owner(name, LaterForm(module, qualname))
            IterDataPipe.register_function(name, LaterForm(module, qualname))


def owner_of(form: str) -> Any:
    """Returns the class or function that a functional name belongs to; None if nothing has it."""
    from torch.utils.data import IterDataPipe

    taken = IterDataPipe.functions.get(form)
    return (getattr(taken, "args", None) or (taken,))[0]  # the class, inside torch's functools.partial


def check_owner(form: str, pipe: Any) -> None:
    """Raises a RuntimeError if a functional name belongs to anything but `pipe` or an earlier definition of it."""
    owner = owner_of(form)
    origin = getattr(owner, "__module__", None), getattr(owner, "__qualname__", None)
    if owner is not None and origin != (pipe.__module__, pipe.__qualname__):
        raise RuntimeError(f"the functional name {form!r} already belongs to {owner!r}")


def install(import_torchdata: Callable[[], object]) -> None:
    """Adds the lookup of names before torch's own; idempotent. `import_torchdata` may raise an ImportError."""
    from torch.utils.data import IterDataPipe, MapDataPipe

    found = IterDataPipe.__getattr__
    torchs = getattr(found, "torchs", found)  # the package's modules may be imported or reloaded several times

    def look_up(pipe: IterDataPipe[Any], name: str) -> Any:
        if name[:1] != "_":
            if name in TORCHDATA_FORMS and name not in IterDataPipe.functions:
                _import_for(name, import_torchdata, _WITHOUT_TORCHDATA.get(name, ""))
            if isinstance(form := IterDataPipe.functions.get(name), LaterForm):
                form.__wrapped__  # noqa: B018 - which registers it
            if name not in IterDataPipe.functions:
                if hint := _hint(name, IterDataPipe.functions):
                    raise AttributeError(f"{type(pipe).__name__!r} object has no attribute {name!r}: {hint}")
            elif name in _CHECKED:
                return _checked(name, pipe, torchs(pipe, name))
        return torchs(pipe, name)

    torchs_of_maps = getattr(MapDataPipe.__getattr__, "torchs", MapDataPipe.__getattr__)

    def look_up_in_map(pipe: MapDataPipe[Any], name: str) -> Any:
        if name in TORCHDATA_MAP_FORMS and name not in MapDataPipe.functions:
            _import_for(name, import_torchdata)
        return torchs_of_maps(pipe, name)

    look_up_in_map.torchs = torchs_of_maps  # type: ignore[attr-defined]
    MapDataPipe.__getattr__ = look_up_in_map  # type: ignore[method-assign]
    # Torch looks this up for every item of every pipe: 190 ns, but 850 ns with an exception because it is missing.
    IterDataPipe._is_child_datapipe = False  # type: ignore[attr-defined]
    look_up.torchs = torchs  # type: ignore[attr-defined]
    IterDataPipe.__getattr__ = look_up  # type: ignore[method-assign]
    for hook in ("repr_hook", "str_hook"):  # keeps those that a program has set
        found_hook = getattr(IterDataPipe, hook)
        if found_hook is None or getattr(found_hook, "__module__", "") == __name__:
            setattr(IterDataPipe, hook, staticmethod(_repr_of))


def _repr_of(pipe: IterDataPipe[Any]) -> str:
    """Draws the graph of a pipe, of torch and others too: most chains end with one of them."""
    from torchdata_wds.pipes.describe import drawn

    return drawn(pipe, str(sys._getframe(2).f_globals.get("__name__")))  # which called __repr__ or __str__ of torch


def _import_for(name: str, import_torchdata: Callable[[], object], instead: str = "") -> None:
    """Imports torchdata for one of its forms; an AttributeError says why it cannot be imported."""
    try:
        import_torchdata()
    except ImportError as error:
        what = f".{name}() is a form of torchdata, which cannot be imported here: {error.__cause__ or error}"
        raise AttributeError(f"{what}; {instead}" if instead else what) from error


def _checked(name: str, pipe: IterDataPipe[Any], form: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(form)
    def checked(*args: Any, **kwargs: Any) -> Any:
        names = list(kwargs)
        if name == "shuffle" and (args or not kwargs.keys() <= {"buffer_size", "unbatch_level"}):
            size = args[0] if args else kwargs.get("bufsize", kwargs.get("size", 1000))
            raise TypeError(
                "torch's .shuffle() takes its size by name, and nothing else. Samples are shuffled with "
                f".wds_shuffle({size!r}), shards with .shuffle() or .shuffle(buffer_size={size!r})"
            )
        if name in _OTHER_MEANING:
            if not (args or kwargs) or argument_hint(name, names):
                raise TypeError(_OTHER_MEANING[name])  # torch's own error would not help
            from torchdata_wds.pipes.chain_text import stages_of

            grouper = owner_of("group_by_key")
            is_imported = isinstance(grouper, type)  # else no pipe of the graph can be one
            if is_imported and any(isinstance(stage, grouper) for stage in stages_of(pipe)):
                # over URLs, torchdata's form is meant
                warn_once(name, _OTHER_MEANING[name])
        elif callable(args[1:2] and args[1]):  # WebDataset's second argument, a flag or column to torch
            names.append("collation_fn" if name == "batch" else "handler")
        if hint := argument_hint(name, names):
            raise TypeError(f"torch's .{name}() has no such argument: {hint}")
        return form(*args, **kwargs)

    return checked


def _hint(name: str, forms: Collection[str]) -> str:
    if name in METHODS:
        return f".{name} is WebDataset's; here {METHODS[name]}"
    if f"wds_{name}" in forms:
        return f".{name}(...){' of WebDataset' if name in SHORTER else ''} is .wds_{name}(...) here"
    if name.startswith("wds_") and name not in forms:
        import difflib

        near = difflib.get_close_matches(name, forms, n=1, cutoff=0.8)
        return f"did you mean .{near[0]}(...)?" if near else ""
    return ""


def export_hint(name: str, own: Iterable[str]) -> str:
    """Returns what to write for a name that WebDataset's package exports; "" if it does not.

    `own` are the forms of this package. Those of torch count only once it has been imported.
    """
    if name in EXPORTS:
        return f"it is WebDataset's; here {EXPORTS[name]}"
    torchs = sys.modules.get("torch.utils.data")
    forms = {*own, *(() if torchs is None else torchs.IterDataPipe.functions)}
    is_form = name in forms or name in TORCHDATA_FORMS
    return _hint(name, forms) or (f"{name} is a form: write .{name}(...)" if is_form else "")


def argument_hint(form: str, names: Iterable[str]) -> str | None:
    """Returns what to write for an argument of WebDataset that a form does not take; None for other arguments."""
    known = ARGUMENTS.get(form, {})
    return next((known[name] for name in names if name in known), None)
