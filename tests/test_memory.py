"""Memory that comes and goes is kept: reading does not ask the system for new pages."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kits.shards import write_tar

READ = """
import resource, sys
from torch.utils.data.datapipes.iter import IterableWrapper
import torchdata_wds
def read():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    count = sum(1 for _ in IterableWrapper(sys.argv[1:]).load_wds_shards().group_by_key())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun) / count
read()
print(min(read() for _ in range(3)))
"""


DECODE = """
import io, resource, sys
from PIL import Image
from torchdata_wds import image_decoder
file = io.BytesIO()
Image.linear_gradient("L").resize((1000, 750)).convert("RGB").save(file, "WEBP")
decode = image_decoder("rgb8").decode
def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        decode(file.getvalue())
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun) / 10
faults()
print(min(faults() for _ in range(3)))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")


def faults(code: str, *arguments: Path) -> float:
    """Runs a program, without limits of malloc that other tests may have set, such as those of Dask."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    return float(run.stdout)


@pytest.mark.slow
def test_reading_takes_no_new_pages(tmp_path: Path) -> None:
    """From the second epoch on, less than one page for each sample of 50 KB."""
    shard = tmp_path / "x.tar"
    write_tar(shard, [(f"{number:06d}.jpg", bytes(50_000)) for number in range(400)])
    assert faults(READ, shard) < 1


@pytest.mark.slow
def test_decoding_takes_no_new_pages() -> None:
    """Neither do the pixels of an image, here of 2.25 MB."""
    assert faults(DECODE) < 10
