"""WebDataset shards as torchdata DataPipes.

Importing the package registers its functional forms (``list_shards``, ``load_wds_shards``, ``group_by_key``, ...) on
``torch.utils.data.IterDataPipe``: at once if torch has been imported, else as soon as the program imports it. torch
itself, and each module of the package, is imported when something of it is first used; torchdata only by
`WorkersReadingService`, or when one of its functional forms is first used.
"""

import importlib
import importlib.util
import os
from typing import TYPE_CHECKING, Any

if os.name == "nt":
    raise ImportError(
        "torchdata_wds runs only on POSIX systems such as Linux and macOS: it needs their fork, file locks and pipes. "
        "On Windows, use it inside the Windows Subsystem for Linux (WSL)"
    )

import torchdata_wds.program_interrupts  # noqa: F401 - before anything that takes time
from torchdata_wds.post_import import when_imported as _when_imported

if TYPE_CHECKING:
    from torchdata_wds.codecs import center_crop_decoder, crop_decoder, handle_extension, image_decoder
    from torchdata_wds.codecs.images.batches import decode_jpegs
    from torchdata_wds.codecs.media import torch_audio, torch_video
    from torchdata_wds.datasets.files import load_dataset
    from torchdata_wds.datasets.indexed_mix import IndexedMixIterDataPipe as IndexedMix
    from torchdata_wds.datasets.indexed_shards import IndexedShards
    from torchdata_wds.datasets.webdataset import WebDataset
    from torchdata_wds.errors import (
        CacheError,
        ChangedShardError,
        DecodingError,
        DivisionError,
        DuplicateFieldError,
        EncodingError,
        MissingFieldError,
        ReappearingKeyError,
        SampleError,
        ShardFormatError,
        ShardListError,
        ShardOpenError,
        SpecError,
        UnsafeDataError,
        WdsError,
    )
    from torchdata_wds.format.documents.layouts import ImageSegment, TextSegment, interleaved_sample
    from torchdata_wds.format.index import ShardIndex, dali_index, wids_index
    from torchdata_wds.format.index.dataset import DatasetIndex
    from torchdata_wds.format.index.scan import index_shard
    from torchdata_wds.format.index.slices import ShardSlice
    from torchdata_wds.format.shards import ShardInfo
    from torchdata_wds.format.tar.members import ShardMember
    from torchdata_wds.handlers import (
        ignore_and_continue,
        ignore_and_stop,
        reraise_exception,
        warn_and_continue,
        warn_and_stop,
    )
    from torchdata_wds.pipes.base import WdsPipe
    from torchdata_wds.pipes.describe import describe
    from torchdata_wds.pipes.order.load_in_order import OrderedLoaderIterDataPipe as OrderedLoader
    from torchdata_wds.pipes.samples.cache_samples import SampleCacherIterDataPipe as SampleCacher
    from torchdata_wds.pipes.samples.collate import SampleUnbatcherIterDataPipe as SampleUnbatcher
    from torchdata_wds.pipes.samples.collate import wds_collate
    from torchdata_wds.pipes.samples.decode import SampleDecoderIterDataPipe as SampleDecoder
    from torchdata_wds.pipes.samples.decode import SampleEncoderIterDataPipe as SampleEncoder
    from torchdata_wds.pipes.samples.documents import DocumentInterleaverIterDataPipe as DocumentInterleaver
    from torchdata_wds.pipes.samples.fields import FieldRenamerIterDataPipe as FieldRenamer
    from torchdata_wds.pipes.samples.fields import FieldTuplerIterDataPipe as FieldTupler
    from torchdata_wds.pipes.samples.fields import KeyExtractorIterDataPipe as KeyExtractor
    from torchdata_wds.pipes.samples.fields import KeyRenamerIterDataPipe as KeyRenamer
    from torchdata_wds.pipes.samples.group_by_key import KeyGrouperIterDataPipe as KeyGrouper
    from torchdata_wds.pipes.samples.map import FieldMapperIterDataPipe as FieldMapper
    from torchdata_wds.pipes.samples.map import StageComposerIterDataPipe as StageComposer
    from torchdata_wds.pipes.samples.map import TupleMapperIterDataPipe as TupleMapper
    from torchdata_wds.pipes.samples.map import WdsMapperIterDataPipe as WdsMapper
    from torchdata_wds.pipes.samples.shuffle import SampleShufflerIterDataPipe as SampleShuffler
    from torchdata_wds.pipes.shards.cache_shards import ShardCacherIterDataPipe as ShardCacher
    from torchdata_wds.pipes.shards.list_shards import ShardListerIterDataPipe as ShardLister
    from torchdata_wds.pipes.shards.list_shards import ShardResamplerIterDataPipe as ShardResampler
    from torchdata_wds.pipes.shards.load_records import CborShardLoaderIterDataPipe as CborShardLoader
    from torchdata_wds.pipes.shards.load_records import MsgpackShardLoaderIterDataPipe as MsgpackShardLoader
    from torchdata_wds.pipes.shards.load_shards import ShardLoaderIterDataPipe as ShardLoader
    from torchdata_wds.pipes.shards.save_shards import ShardSaverIterDataPipe as ShardSaver
    from torchdata_wds.pipes.shards.shard_copies import CachedShard
    from torchdata_wds.pipes.shards.split_shards import ShardSplitterIterDataPipe as ShardSplitter
    from torchdata_wds.pipes.streams.epoch import EpochCounterIterDataPipe as EpochCounter
    from torchdata_wds.pipes.streams.join_workers import JoinWorkersIterDataPipe as JoinWorkers
    from torchdata_wds.pipes.streams.mix import SampleMixerIterDataPipe as SampleMixer
    from torchdata_wds.workers.loader import WdsLoader
    from torchdata_wds.workers.profile.profiling import profile_pipe
    from torchdata_wds.workers.profile.repeated_batches import repeat_batches
    from torchdata_wds.workers.ray.actor_pool import RayPool
    from torchdata_wds.workers.ray.reading_service import RayReadingService
    from torchdata_wds.workers.resume.stateful import StatefulPipeline
    from torchdata_wds.workers.service import WorkersReadingService
    from torchdata_wds.writers.shard_writer import ShardWriter
    from torchdata_wds.writers.tar_writer import TarWriter

__version__ = "0.1.0"

__all__ = [
    "WebDataset", "load_dataset", "IndexedShards", "IndexedMix", "WdsLoader", "WorkersReadingService",
    "StatefulPipeline", "RayPool", "RayReadingService", "profile_pipe", "repeat_batches", "describe",
    "wds_collate", "handle_extension", "image_decoder", "crop_decoder", "center_crop_decoder", "decode_jpegs",
    "torch_video", "torch_audio", "TextSegment", "ImageSegment", "interleaved_sample", "ShardMember", "ShardSlice",
    "CachedShard",
    # writing
    "TarWriter", "ShardWriter", "ShardInfo", "ShardIndex", "DatasetIndex", "index_shard", "dali_index", "wids_index",
    # pipes, in the order of the functional forms' table in the README
    "ShardLister", "ShardResampler", "ShardSplitter", "ShardCacher", "ShardLoader", "OrderedLoader", "KeyGrouper",
    "SampleShuffler",
    "SampleDecoder", "DocumentInterleaver", "FieldRenamer", "FieldMapper", "KeyRenamer", "FieldTupler", "KeyExtractor",
    "TupleMapper", "WdsMapper", "StageComposer", "SampleUnbatcher", "SampleMixer", "EpochCounter", "SampleCacher",
    "CborShardLoader", "MsgpackShardLoader", "JoinWorkers", "SampleEncoder", "ShardSaver", "WdsPipe",
    # handlers
    "reraise_exception", "warn_and_continue", "ignore_and_continue", "warn_and_stop", "ignore_and_stop",
    # exceptions
    "WdsError", "ShardListError", "ShardOpenError", "ShardFormatError", "SampleError", "DuplicateFieldError",
    "ReappearingKeyError", "MissingFieldError", "DecodingError", "EncodingError", "CacheError", "UnsafeDataError",
    "SpecError", "DivisionError", "ChangedShardError",
]  # fmt: skip


def _has_torchdata() -> bool:
    try:
        return importlib.util.find_spec("torchdata") is not None
    except ImportError:  # of a program that hides it
        return False


if not _has_torchdata():
    for _name in ("WorkersReadingService", "RayReadingService"):
        __all__.remove(_name)  # or `from torchdata_wds import *` would be an error

#: The modules of the public names, which are imported when a name is first used. Pipes are classes with a long name.
_MODULES = {
    "codecs": "center_crop_decoder crop_decoder handle_extension image_decoder",
    "codecs.images.batches": "decode_jpegs",
    "codecs.media": "torch_audio torch_video",
    "datasets.files": "load_dataset",
    "datasets.indexed_mix": "IndexedMix",
    "datasets.indexed_shards": "IndexedShards",
    "datasets.webdataset": "WebDataset",
    "errors": (
        "CacheError ChangedShardError DecodingError DivisionError DuplicateFieldError EncodingError MissingFieldError "
        "ReappearingKeyError SampleError ShardFormatError ShardListError ShardOpenError SpecError UnsafeDataError "
        "WdsError"
    ),
    "format.documents.layouts": "ImageSegment TextSegment interleaved_sample",
    "format.index": "ShardIndex dali_index wids_index",
    "format.index.dataset": "DatasetIndex",
    "format.index.scan": "index_shard",
    "format.index.slices": "ShardSlice",
    "format.shards": "ShardInfo",
    "format.tar.members": "ShardMember",
    "handlers": "ignore_and_continue ignore_and_stop reraise_exception warn_and_continue warn_and_stop",
    "pipes.base": "WdsPipe",
    "pipes.describe": "describe",
    "pipes.order.load_in_order": "OrderedLoader",
    "pipes.samples.cache_samples": "SampleCacher",
    "pipes.samples.collate": "SampleUnbatcher wds_collate",
    "pipes.samples.decode": "SampleDecoder SampleEncoder",
    "pipes.samples.documents": "DocumentInterleaver",
    "pipes.samples.fields": "FieldRenamer FieldTupler KeyExtractor KeyRenamer",
    "pipes.samples.group_by_key": "KeyGrouper",
    "pipes.samples.map": "FieldMapper StageComposer TupleMapper WdsMapper",
    "pipes.samples.shuffle": "SampleShuffler",
    "pipes.shards.cache_shards": "ShardCacher",
    "pipes.shards.list_shards": "ShardLister ShardResampler",
    "pipes.shards.load_records": "CborShardLoader MsgpackShardLoader",
    "pipes.shards.load_shards": "ShardLoader",
    "pipes.shards.save_shards": "ShardSaver",
    "pipes.shards.shard_copies": "CachedShard",
    "pipes.shards.split_shards": "ShardSplitter",
    "pipes.streams.epoch": "EpochCounter",
    "pipes.streams.join_workers": "JoinWorkers",
    "pipes.streams.mix": "SampleMixer",
    "workers.loader": "WdsLoader",
    "workers.profile.profiling": "profile_pipe",
    "workers.profile.repeated_batches": "repeat_batches",
    "workers.ray.actor_pool": "RayPool",
    "workers.ray.reading_service": "RayReadingService",
    "workers.resume.stateful": "StatefulPipeline",
    "workers.service": "WorkersReadingService",
    "writers.shard_writer": "ShardWriter",
    "writers.tar_writer": "TarWriter",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}

#: The functional forms, in the order of the table in the README, with the public names of their pipes.
_FORMS = {
    "list_shards": "ShardLister",
    "resample_shards": "ShardResampler",
    "split_shards": "ShardSplitter",
    "cache_shards": "ShardCacher",
    "load_wds_shards": "ShardLoader",
    "load_in_order": "OrderedLoader",
    "group_by_key": "KeyGrouper",
    "wds_shuffle": "SampleShuffler",
    "wds_decode": "SampleDecoder",
    "wds_interleaved": "DocumentInterleaver",
    "wds_rename": "FieldRenamer",
    "wds_map_dict": "FieldMapper",
    "wds_rename_keys": "KeyRenamer",
    "wds_to_tuple": "FieldTupler",
    "wds_extract_keys": "KeyExtractor",
    "wds_map_tuple": "TupleMapper",
    "wds_map": "WdsMapper",
    "wds_compose": "StageComposer",
    "wds_unbatch": "SampleUnbatcher",
    "wds_mix": "SampleMixer",
    "wds_epoch": "EpochCounter",
    "cache_samples": "SampleCacher",
    "load_cbor_shards": "CborShardLoader",
    "load_msgpack_shards": "MsgpackShardLoader",
    "join_workers": "JoinWorkers",
    "wds_encode": "SampleEncoder",
    "save_wds_shards": "ShardSaver",
}
_PIPES = {*_FORMS.values(), "IndexedMix"}

#: What can be reached as an attribute of the package without an import of its own.
_PACKAGES = {
    "codecs", "consumers", "datasets", "errors", "format", "handlers", "pipes", "storage", "workers", "writers"
}  # fmt: skip


def _class_name(name: str) -> str:
    return f"{name}IterDataPipe" if name in _PIPES else name


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), _class_name(name))
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    hint = ""
    if not name.startswith("_"):
        from torchdata_wds.pipes.form_names import export_hint

        hint = export_hint(name, _FORMS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint and ': '}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register() -> None:
    """Registers the forms on torch's pipes; each imports its own pipe when it is first used."""
    from torchdata_wds.pipes import form_names
    from torchdata_wds.workers import import_torchdata

    form_names.add_forms({form: (_HOMES[name], _class_name(name)) for form, name in _FORMS.items()})
    form_names.install(import_torchdata)


_when_imported("torch.utils.data", _register)
