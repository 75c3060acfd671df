"""Random graphs over uneven shards, the same for a number in every process, and what must hold of each."""

import random
from typing import Any, NamedTuple

from torch.utils.data.datapipes.iter import IterableWrapper

from tests.kits.resume_kit import augment, fail_on_one, is_odd, row, twice
from tests.kits.torchdata import is_installed
from torchdata_wds.handlers import ignore_and_continue


class RandomGraph(NamedTuple):
    """A graph, and what is known about it."""

    pipe: Any
    states: str  # where a state can be taken: "anywhere", "between" epochs or "never"
    is_exact: bool  # whether each epoch has the same samples, on all ranks and workers together


def random_graph(urls: list[str], number: int) -> RandomGraph:
    """Builds graph `number`; the shards must have indexes. Torchdata's forms are among its stages where they are."""
    draw = random.Random(number)
    kinds = [draw.choice(_KINDS)]
    pipe = _samples(urls, kinds[0], draw)
    if draw.random() < 0.2:
        kinds.append(draw.choice(_KINDS))
        stop = draw.choice(["all", "first", "cycle"])
        weights = draw.choice([None, [0.4, 0.6]])
        pipe = pipe.wds_mix(_samples(urls, kinds[1], draw), weights=weights, stop=stop)
        kinds += [] if stop == "all" else ["cut"]
    is_exact = set(kinds) <= {"filter", "split", "index"}
    if draw.random() < 0.6:
        pipe = pipe.wds_shuffle(draw.choice([2, 5, 9]), initial=draw.choice([1, 2]))
    pipe = pipe.wds_decode()
    if draw.random() < 0.2:
        pipe = pipe.filter(is_odd)
    elif draw.random() < 0.3:
        pipe = pipe.wds_map(fail_on_one, handler=ignore_and_continue)
    # Threads of prefetch draw from the global generators at any time, so that nothing random may come before them.
    is_random = draw.random() < 0.7
    pipe = pipe.map(augment) if is_random else pipe
    pipe = pipe.shuffle(buffer_size=4) if draw.random() < 0.2 else pipe
    pipe = pipe.map(row)
    if is_installed() and draw.random() < 0.3:
        forms = [pipe.flatmap(doubled), pipe.enumerate().map(last), pipe.set_length(99)]
        pipe = draw.choice(forms if is_random else [*forms, pipe.prefetch(2)])
    if draw.random() < 0.6:
        pipe = pipe.batch(draw.choice([2, 3]))
        pipe = pipe.collate(as_list) if draw.random() < 0.5 else pipe
    is_counted = "resample" in kinds or draw.random() < 0.3
    if is_counted:
        pipe, is_exact = pipe.wds_epoch(draw.choice([3, 7, 12, 20])), False
        pipe = pipe.batch(2) if draw.random() < 0.4 else pipe
    states = "anywhere"
    if draw.random() < 0.3:
        joined, states = _joined(pipe, draw, is_counted=is_counted, is_random=is_random)
        # Without workers, the second pass of cycle shuffles the shards in another order on each rank.
        inexact = "MapperIterDataPipe", "EpochCounterIterDataPipe", "CyclerIterDataPipe"
        is_exact = is_exact and type(joined).__name__ not in inexact
        pipe = joined
    return RandomGraph(pipe, states, is_exact)


#: How shards are divided; of "drop" and "pad" it depends on the order which samples are left out or repeated.
_KINDS = ("filter", "filter", "split", "index", "drop", "pad", "resample", "some")


def _samples(urls: list[str], kind: str, draw: random.Random) -> Any:
    """Samples of shards that are divided in some way."""
    shards: Any = IterableWrapper(urls)
    shards = IterableWrapper([urls]).list_shards() if draw.random() < 0.3 else shards
    shards = shards.shuffle() if draw.random() < 0.8 else shards
    match kind:
        case "filter":
            shards = shards.sharding_filter()
        case "split":
            shards = shards.split_shards()
        case "index" | "drop" | "pad":
            shards = shards.split_shards(True, even=None if kind == "index" else kind)
        case "resample":
            shards = shards.resample_shards(replacement=draw.random() < 0.5)
        case "some":
            shards = shards.resample_shards(4)
    return shards.load_wds_shards(interleave=draw.choice([1, 1, 1, 2])).group_by_key()


def _joined(pipe: Any, draw: random.Random, *, is_counted: bool, is_random: bool) -> tuple[Any, str]:
    """Joins the workers before more stages; where a state in the middle is refused, it can be taken between epochs."""
    pipe = pipe.join_workers()
    kinds = ["nothing", "batches", "shuffled", "apart", *([] if is_counted else ["counted"])]
    if is_installed():
        kinds += ["cycled", *([] if is_random else ["prefetched"])]
    match draw.choice(kinds):
        case "batches":
            return pipe.batch(2).map(twice), "anywhere"
        case "shuffled":
            return pipe.wds_shuffle(6), "between"
        case "apart":
            return pipe.batch(3).unbatch(), "between"
        case "prefetched":
            return pipe.prefetch(3), "between"
        case "cycled":
            return pipe.cycle(2), "never" if is_counted else "between"
        case "counted":
            return pipe.wds_epoch(9), "never"
    return pipe, "anywhere"


def as_list(item: Any) -> list[Any]:
    return list(item)


def doubled(item: Any) -> list[Any]:
    return [item, item]


def last(item: Any) -> Any:
    return item[-1]
