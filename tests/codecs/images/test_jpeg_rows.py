"""JPEG files of which only the first rows are needed: the same pixels and the same errors as of the whole."""

import itertools
import random
import warnings

import numpy as np

from tests.codecs.images.test_jpeg import WAYS, damaged, picture
from tests.kits.shards import image_file
from torchdata_wds.codecs import image_decoder
from torchdata_wds.codecs.images import jpeg


def test_first_rows_are_the_same_when_the_others_are_left_out() -> None:
    """At every step, whatever encoder wrote them; none are left out of progressive files and those with restarts."""
    for options, step, mode in itertools.product(WAYS, jpeg.STEPS, ("RGB", "L")):
        file = jpeg.open_jpeg(image_file(picture((75, 100), mode=mode), "JPEG", **options), mode, exif_transpose=False)
        assert file is not None
        whole = file.decode(step)
        if whole is None:
            continue  # Pillow decodes it
        is_whole = {"progressive", "restart_marker_blocks", "restart_marker_rows"} & {*options}
        for rows in range(1, len(whole), 3):
            part = file.decode(step, rows)
            assert part is not None
            assert np.array_equal(part[:rows], whole[:rows]), (options, step, rows)
            assert len(part) == (len(whole) if is_whole or (rows + 2) * step > 95 else rows + 2)


def test_damage_has_the_same_outcome_when_rows_are_left_out() -> None:
    """Pillow decodes truncated files and those with damage in the needed rows; of others these are the same."""
    chance = random.Random(1)
    data = image_file(picture((75, 100)), "JPEG")
    given = 0
    for number in range(300):
        broken = damaged(data, chance) if number % 2 else data[: chance.randrange(600, len(data))]
        file = jpeg.open_jpeg(broken, "RGB", exif_transpose=False)
        part = None if file is None else file.decode(1, 40)
        with warnings.catch_warnings(action="ignore"):
            try:
                whole = np.asarray(image_decoder("rgb8").decode(broken))
            except Exception:
                assert part is None
                continue
        if part is not None:
            given += 1
            assert np.array_equal(part[:40], whole[:40])
    assert given > 20
