"""What tests of ``wds map`` share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.map_kit import FUNCTIONS, MODULE, SIBLING, SIZES
from tests.kits.shards import write_text_shards


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: eight shards and a module."""
    monkeypatch.chdir(tmp_path)
    write_text_shards(tmp_path, SIZES)
    (tmp_path / f"{MODULE}.py").write_text(f"HERE = {str(tmp_path)!r}\n{FUNCTIONS}")
    (tmp_path / "map_tool_sibling.py").write_text(SIBLING)
    yield tmp_path
    assert str(tmp_path) not in sys.path
    for name in (MODULE, "map_tool_sibling"):
        sys.modules.pop(name, None)
