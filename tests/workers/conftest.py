"""What holds for all tests of workers."""

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.kits.pool_suite")

from tests.kits.resume_kit import indexed_shards_in  # noqa: E402
from tests.kits.shards import text_samples, write_tar, write_text_shards  # noqa: E402
from tests.kits.workers_kit import SIZES, time_limit  # noqa: E402


@pytest.fixture(autouse=True)
def _never_hang() -> Iterator[None]:
    """Turns a hang into an error, and ends every worker that a test leaves."""
    with time_limit(180):
        yield


@pytest.fixture(scope="module")
def text_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The shards of the stored orders."""
    return write_text_shards(tmp_path_factory.mktemp("text"), SIZES)


@pytest.fixture(scope="module")
def indexed_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Small shards, with an index beside each."""
    return indexed_shards_in(tmp_path_factory.mktemp("indexed"))


@pytest.fixture(scope="module")
def skipping_urls(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of five samples with a hidden file each, and one that is not there."""
    folder = tmp_path_factory.mktemp("skipping")
    members = [[*text_samples(f"s{number}", 5), (".hidden", b"x")] for number in range(3)]
    urls = [write_tar(folder / f"{number}.tar", found) for number, found in enumerate(members)]
    return [*urls, str(folder / "gone.tar")]
