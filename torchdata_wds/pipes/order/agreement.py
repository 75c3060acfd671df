"""Notices that ranks read different lists of shards, or the same in another order: positions would not be the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torchdata_wds.errors import ShardListError
from torchdata_wds.pipes.chain_text import form_name
from torchdata_wds.pipes.lone_ranks import in_time, store_of
from torchdata_wds.process_place import distributed_place

_begun: Counter[str] = Counter()  # how many epochs of one kind this process has begun


def check_agreement(pipe: Any, digest: str, seed: int, epoch: int) -> None:
    """Raises a ShardListError if another rank has begun the same epoch with another order.

    No rank waits for another: the first one notes its order in the key-value store of ``torch.distributed``, and the
    others compare. Where there is no store, nothing is compared.
    """
    store = store_of(pipe)
    if store is None:
        return
    # Ranks may begin an epoch several times, and have several loaders, which are told apart by their arguments: a
    # training and a validation set are seldom shuffled alike. Ranks begin those in the same sequence.
    kind = f"torchdata_wds/order/{form_name(pipe)}/{pipe.order_arguments()!r}/{seed}/{epoch}"
    _begun[kind] += 1
    key = f"{kind}/{_begun[kind]}"
    noted = in_time(lambda: store.compare_set(key, "", digest))
    if noted is None or noted.decode() == digest:
        return
    place = distributed_place()
    raise ShardListError(
        f"{form_name(pipe)} lists other shards in rank {place.number if place else 0} than in the rank that began this "
        f"epoch first, or lists them in another order: its order is {digest}, and that of the other rank "
        f"{noted.decode()}. Samples would be lost. Pass the same list in all ranks; sort what glob.glob() returns"
    )
