"""The base class of all pipes, with what editors and type checkers see of the functional forms.

``python -m tests.kits.declared_forms`` writes the forms anew, from the constructors of the pipes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterDataPipe

from torchdata_wds.pipes import describe
from torchdata_wds.pipes.pickling import check_functions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Literal, Unpack

    from torch.utils.data import DataChunk

    from torchdata_wds.codecs import EncoderLike
    from torchdata_wds.codecs.images.decoding import ImageFieldDecoder
    from torchdata_wds.format.index.slices import ShardSlice
    from torchdata_wds.format.shards import ShardInfo
    from torchdata_wds.format.tar.members import ShardMember
    from torchdata_wds.handlers import Handler
    from torchdata_wds.option_types import (
        Even,
        Index,
        KeyRule,
        Layout,
        Missing,
        Naming,
        OnDuplicate,
        OnReappearing,
        Select,
        Spec,
        StartShard,
        Stop,
    )
    from torchdata_wds.storage.places import RewriteRules
    from torchdata_wds.writers.tar_writer import TarOptions

    StorageOptions = Mapping[str, Mapping[str, Any]] | None
    Rewrite = str | Mapping[str, str] | RewriteRules | None

T_co = TypeVar("T_co", covariant=True)


class WdsPipe(IterDataPipe[T_co]):
    """Base class of the package's pipes."""

    def _repr_html_(self) -> str:
        return describe.html_of(self)

    def __reduce_ex__(self, *args: Any) -> Any:
        if self.reduce_ex_hook is None:  # not for a traversal of the graph
            check_functions(self, sys._getframe(1))
        return super().__reduce_ex__(*args)

    if TYPE_CHECKING:
        # What editors and type checkers see of the functional forms. A test compares each with its constructor.
        # fmt: off
        def list_shards(self, *, storage_options: StorageOptions = None, rewrite: Rewrite = None) -> WdsPipe[str]: ...
        def resample_shards(self, n: int | None = None, *, replacement: bool = True) -> WdsPipe[T_co]: ...
        def split_shards(
            self, index: Index = None, *, even: Even = None, storage_options: StorageOptions = None,
            rewrite: Rewrite = None
        ) -> WdsPipe[ShardSlice]: ...
        def cache_shards(
            self, folder: str | os.PathLike[str] | None, *, max_bytes: float | None = None, name: Naming = None,
            verify: bool = True, while_reading: bool = True, cache_local: bool = False, verbose: bool = False,
            storage_options: StorageOptions = None, rewrite: Rewrite = None, handler: Handler = ...
        ) -> WdsPipe[Any]: ...
        def load_wds_shards(
            self, *, select: Select | None = None, rename: Callable[[str], str] | None = None,
            keys: KeyRule = "first_dot", require_end_marker: bool = True, concatenated: bool = False,
            read_ahead: int = 0, interleave: int = 1, max_member_bytes: int = ...,
            storage_options: StorageOptions = None, rewrite: Rewrite = None, handler: Handler = ...
        ) -> WdsPipe[ShardMember]: ...
        def load_in_order(
            self, *, index: Any = "auto", index_dir: str | os.PathLike[str] | None = None, shuffle: bool = True,
            run: int = 16, even: Even = None, seed: int | None = None, block: int = 1,
            keys: Literal["first_dot", "last_dot"] = "first_dot", lowercase: bool = True,
            fields: Iterable[str] | str | None = None, on_duplicate: OnDuplicate = "error",
            cache: str | os.PathLike[str] | None = None, read_ahead: int | None = None,
            storage_options: StorageOptions = None, rewrite: Rewrite = None, handler: Handler = ...
        ) -> WdsPipe[dict[str, Any]]: ...
        def group_by_key(
            self, *, keys: KeyRule = "first_dot", lowercase: bool = True, fields: Iterable[str] | str | None = None,
            on_duplicate: OnDuplicate = "error", on_reappearing: OnReappearing = "error", handler: Handler = ...
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_shuffle(
            self, buffer_size: int = 1000, *, initial: int = 100, max_bytes: int | None = None
        ) -> WdsPipe[T_co]: ...
        def wds_decode(
            self, *decoders: str | Callable[[str, Any], Any], only: str | Sequence[str] | None = None,
            allow_pickle: bool = False, exif_transpose: bool = False, errors: str = "strict", max_bytes: int = ...,
            handler: Handler = ...
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_interleaved(
            self, *, layout: Layout = "auto", missing: Missing = "error", images: str | ImageFieldDecoder | None = None,
            min_images: int | None = None, max_images: int | None = None, min_similarity: float | None = None,
            handler: Handler = ...
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_rename(
            self, /, *, keep: bool = True, handler: Handler = ..., **specs: Spec
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_map_dict(
            self, /, *, handler: Handler = ..., **fns: Callable[[Any], Any]
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_rename_keys(
            self, /, *renames: tuple[str, str], keep_unselected: bool = False, must_match: bool = True,
            duplicate_is_error: bool = True, handler: Handler = ..., **globs: str
        ) -> WdsPipe[dict[str, Any]]: ...
        def wds_to_tuple(
            self, *specs: Spec, missing: Literal["error", "skip", "none"] = "error", handler: Handler = ...
        ) -> WdsPipe[tuple[Any, ...]]: ...
        def wds_extract_keys(
            self, *patterns: Spec, duplicate_is_error: bool = True, ignore_missing: bool = False, handler: Handler = ...
        ) -> WdsPipe[tuple[Any, ...]]: ...
        def wds_map_tuple(
            self, *fns: Callable[[Any], Any] | None, handler: Handler = ...
        ) -> WdsPipe[tuple[Any, ...]]: ...
        def wds_map(self, fn: Callable[[Any], Any], *, handler: Handler = ...) -> WdsPipe[Any]: ...
        def wds_compose(self, fn: Callable[..., Iterable[Any]], /, *args: Any, **kwargs: Any) -> WdsPipe[Any]: ...
        def wds_unbatch(self) -> WdsPipe[Any]: ...
        def wds_mix(
            self, *others: IterDataPipe[Any], weights: Sequence[float] | None = None, stop: Stop | None = None
        ) -> WdsPipe[Any]: ...
        def wds_encode(
            self, encoder: EncoderLike = True, *, jpeg_quality: int = 95, png_compression: int = 6,
            handler: Handler = ...
        ) -> WdsPipe[dict[str, Any]]: ...
        def save_wds_shards(
            self, pattern: str | os.PathLike[str], *, max_count: int = 100000, max_bytes: float = 3000000000.0,
            start_shard: StartShard = 0, post: Callable[[ShardInfo], Any] | None = None, overwrite: bool = False,
            handler: Handler = ..., **options: Unpack[TarOptions]
        ) -> WdsPipe[ShardInfo]: ...
        def wds_epoch(self, n: int) -> WdsPipe[T_co]: ...
        def cache_samples(
            self, file: str | os.PathLike[str] | None, *, max_samples: int | None = None, allow_pickle: bool = False,
            handler: Handler = ...
        ) -> WdsPipe[T_co]: ...
        def load_cbor_shards(
            self, *, max_bytes: int = ..., storage_options: StorageOptions = None, rewrite: Rewrite = None,
            handler: Handler = ...
        ) -> WdsPipe[Any]: ...
        def load_msgpack_shards(
            self, *, max_bytes: int = ..., storage_options: StorageOptions = None, rewrite: Rewrite = None,
            handler: Handler = ...
        ) -> WdsPipe[Any]: ...
        def join_workers(self) -> WdsPipe[T_co]: ...

        # fmt: on
        # torch's own forms, so that a chain keeps its type through them
        def shuffle(self, *, buffer_size: int = 10000, unbatch_level: int = 0) -> WdsPipe[T_co]: ...
        def sharding_filter(self, sharding_group_filter: Any = None) -> WdsPipe[T_co]: ...
        def batch(
            self, batch_size: int, drop_last: bool = False, wrapper_class: type[DataChunk[Any]] = ...
        ) -> WdsPipe[Any]: ...
        def collate(self, conversion: Any = ..., collate_fn: Callable[..., Any] | None = None) -> WdsPipe[Any]: ...
        def map(self, fn: Callable[..., Any], input_col: Any = None, output_col: Any = None) -> WdsPipe[Any]: ...
        def filter(self, filter_fn: Callable[..., Any], input_col: Any = None) -> WdsPipe[T_co]: ...
