"""Write the samples of many shards into one.

wds cat 'train-{000000..000003}.tar' -o all.tar
wds cat 'train-*.tar' --shuffle 1000 --seed 1 -c 10 -f 'jpg label=cls' -o few.tar
wds cat train-000000.tar train-000000.tar --rekey '#' | wds ls
wds cat 'train-*.tar' --order 1 --run 4 -o shuffled.tar
"""

import argparse
import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import islice
from typing import Any

from torchdata_wds.cli import outputs
from torchdata_wds.cli.command import Command, UsageError, add_parallel, add_seed, option, positive_number, whole_number
from torchdata_wds.cli.inputs import SampleReader, add_input_arguments, list_inputs
from torchdata_wds.cli.sample_order import OrderedReader, add_order_arguments, check_order_arguments
from torchdata_wds.pipes.samples.shuffle_buffer import shuffled


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    option(parser, "-c --count", "N", "stop after N samples", whole_number)
    option(parser, "--skip", "N", "skip the first N samples", whole_number, default=0)
    text = "read the shards in random order (unless --slice is given), and shuffle samples through a buffer of N"
    option(parser, "--shuffle", "N", text, positive_number)
    add_seed(parser, "--shuffle")
    add_order_arguments(parser)
    option(parser, "--mix", "K", "keep K shards open and take a sample from each in turn", positive_number, default=1)
    add_parallel(parser, "read N shards (with --order, N pieces of them) at once; the order stays the same")
    outputs.add_field_arguments(parser)
    outputs.add_output_arguments(parser)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None and arguments.shuffle is None:
        raise UsageError("--seed needs --shuffle, whose order it chooses")
    if arguments.order is not None and (arguments.shuffle is not None or arguments.mix != 1):
        raise UsageError("--order is an order of all samples: use it without --shuffle and --mix")
    check_order_arguments(arguments)
    choices = outputs.field_choices(arguments)
    rng = None if arguments.shuffle is None else random.Random(outputs.chosen_seed(arguments.seed))
    reader = _reader(arguments, rng)
    with (
        outputs.SampleOutput(arguments) as output,
        closing(reader.taken(choices.choose) if choices.columns else iter(reader)) as source,
    ):
        samples: Iterator[Mapping[str, Any]] = source
        if rng is not None:
            samples = shuffled(samples, rng, arguments.shuffle, arguments.shuffle)
        # two slices: the sum of --skip and --count may be too large for islice
        outputs.copy_samples(islice(islice(samples, arguments.skip, None), arguments.count), output, reader)
    choices.tell()
    return reader.finish()


def _reader(arguments: argparse.Namespace, rng: random.Random | None) -> SampleReader:
    if arguments.order is not None:
        return OrderedReader(arguments, parallel=arguments.parallel)
    urls = list_inputs(arguments)
    if rng is not None and arguments.slice is None:
        rng.shuffle(urls)
    # --parallel counts the shard that is being read too
    return SampleReader(arguments, urls=urls, read_ahead=arguments.parallel - 1, interleave=arguments.mix)


COMMAND = Command(__doc__, _add_arguments, _run)
