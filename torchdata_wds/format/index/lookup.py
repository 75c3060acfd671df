from torchdata_wds.format.index.dataset import DatasetIndex
from torchdata_wds.format.index.scan import index_shard

_known = {}


def find_index(urls, index="auto", *, index_dir=None, keys="first_dot", storage_options=None):
    if isinstance(index, DatasetIndex):
        return index
    t = tuple(urls)
    if t not in _known:
        _known[t] = DatasetIndex.of((u, index_shard(u, to=False)) for u in urls)
    return _known[t]
