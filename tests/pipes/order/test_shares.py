"""A rank without samples is an error in all ranks, not a wait for ever in the others."""

import pytest

from torchdata_wds.errors import ShardListError
from torchdata_wds.option_types import Even
from torchdata_wds.pipes.order.ordered_pipe import check_share


@pytest.mark.parametrize(
    ("total", "ranks", "block", "even", "cure"),
    [
        (0, 1, 1, None, "load_in_order has no samples"),
        (0, 2, 1, "pad", "load_in_order has no samples"),
        (3, 4, 1, None, "fewer ranks, or even='pad'$"),
        (3, 4, 8, "drop", "fewer ranks, or even='pad'$"),
        (10, 4, 8, None, "10 samples in blocks of 8 for 4 ranks.*or even='drop' or 'pad'$"),
        (16, 3, 8, None, "fewer ranks, or even='drop' or 'pad'$"),
    ],
)
def test_a_rank_without_samples_is_refused(total: int, ranks: int, block: int, even: Even, cure: str) -> None:
    """With what would give it some."""
    with pytest.raises(ShardListError, match=cure):
        check_share("load_in_order", total, ranks, block, even)


@pytest.mark.parametrize(
    ("total", "ranks", "block", "even"),
    [(1, 1, 8, None), (17, 3, 8, None), (4, 4, 8, "drop"), (1, 6, 8, "pad"), (10, 4, 8, "pad")],
)
def test_ranks_that_all_get_something_are_enough(total: int, ranks: int, block: int, even: Even) -> None:
    """The last rank gets the least."""
    check_share("load_in_order", total, ranks, block, even)
