"""WebDataset's names, and what to write for them here: methods, arguments and what its package exports."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "EXPORTS", "METHODS", "SHORTER"]

#: Names of WebDataset that are those of forms here without ``wds_``.
SHORTER = ("compose", "decode", "extract_keys", "map_dict", "map_tuple", "rename", "rename_keys", "to_tuple")

#: What WebDataset, in its releases 0.1 to 1.0, calls something that has another name here.
METHODS = {
    "append": "a pipe never changes: chain a form instead, as pipe = pipe.wds_map(f)",
    "associate": "write .wds_map(f), where f adds what belongs to the sample",
    "batched": "write .batch(n).collate(wds_collate); partial=False is .batch(n, drop_last=True)",
    "cache": "write .cache_shards(folder) before .load_wds_shards(), or .cache_samples(file)",
    "cached": "write .in_memory_cache(), or .cache_samples(file)",
    "close": "nothing is open outside an iteration; the workers end with loader.shutdown()",
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
    "nbatches": "write .set_length(n)",
    "parallel": "write DataLoader2(pipe, reading_service=WorkersReadingService(n)) around the pipe",
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
    "with_length": "write .set_length(n)",
    "xdecode": 'write .wds_decode(handle_extension("left.png", f), only="left.png")',
}

#: What the package of WebDataset exports, besides functions that are also methods.
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
    "WebLoader": "write DataLoader2(pipe, reading_service=WorkersReadingService(n)), or torch's DataLoader",
    "gopen": "write .load_wds_shards(), which opens URLs itself",
    "gopen_schemes": "another scheme is fsspec.register_implementation(...)",
    "gzfilter": ".wds_decode() takes compression off by itself",
    "imagehandler": 'write .wds_decode("rgb"), or image_decoder("rgb")',
    "non_empty": "a pattern that matches nothing raises by itself",
    "numpy_dumps": "the writers encode arrays by themselves",
    "pipe_cleaner": "samples keep their URL as it is",
    "pipelinefilter": "write .wds_compose(f, *args)",
    "pytorch_weights_only": "the fields pth and pt are always read with weights only",
    "shardspec": "write load_dataset(file)",
    "single_node_only": "the loader divides the shards among nodes",
    "tarfile_samples": "write .load_wds_shards().group_by_key()",
    "torch_dumps": "the writers encode tensors by themselves",
    "torch_loads": "write .wds_decode()",
    "transform_with": "write .wds_map(f)",
}

#: Arguments that WebDataset's methods take, by the form that has the method's name or place here.
ARGUMENTS = {
    "batch": {
        "batchsize": "write .batch(n)",
        "collate_fn": "write .batch(n).collate(f)",
        "collation_fn": "write .batch(n).collate(wds_collate), or a function of yours in its place",
        "partial": "partial=False is drop_last=True",
    },
    "filter": {"handler": "the form with a handler is .wds_map(f, handler=...), where f returns None to drop an item"},
    "map": {"handler": "the form with a handler is .wds_map(f, handler=...)"},
    "repeat": {
        "nbatches": "write .wds_epoch(n)",
        "nepochs": "write .cycle(n)",
    },
    "wds_decode": {
        "partial": 'fields without a decoder stay bytes in any case; only="jpg cls" decodes some fields',
        "pre": "decoders are tried in order, and a function that returns None passes: put yours first",
        "post": "decoders are tried in order, and a function that returns None passes: put yours last",
    },
    "wds_epoch": {
        "nbatches": "write .wds_epoch(n) after .batch()",
        "nsamples": "write .wds_epoch(n) before .batch()",
    },
    "wds_shuffle": {
        "bufsize": "write .wds_shuffle(n)",
        "rng": "seeds come from the loader: WorkersReadingService(n, seed=s), or torch.manual_seed(s)",
        "seed": "seeds come from the loader: WorkersReadingService(n, seed=s), or torch.manual_seed(s)",
        "size": "write .wds_shuffle(n)",
    },
    "wds_to_tuple": {"missing_is_error": 'missing_is_error=False is missing="none"'},
}
