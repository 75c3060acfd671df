"""The benchmark of web servers runs, and its file's name harms no other script."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_benchmarks import BENCHMARKS, check_table, rows, run

pytestmark = pytest.mark.slow


def test_http_compares_with_curl_and_hides_latency(tmp_path: Path) -> None:
    """Ours reads the bytes with and without a checksum, and samples with and without latency."""
    printed, content = run("http.py", tmp_path / "shards", tmp_path)
    check_table(printed, content)
    kinds = {kind for kind, _ in rows(content)}
    names = {kind: {name for row_kind, name in rows(content) if row_kind == kind} for kind in kinds}
    assert {"ours", "ours, no tag, no parts"} <= names["stream"]
    assert ("curl to a pipe" in names["stream"]) is ("curl" not in content["left_out"])
    assert {"ours, no latency", "ours, 50 ms", "ours, 50 ms, read_ahead=8"} == names["latency"]
    for kind in ("cache, text", "cache, images"):
        assert names[kind] == {"ours, no cache", "ours, first pass", "ours, second pass"}


def test_scripts_find_the_module_of_the_standard_library_when_they_import_http() -> None:
    """A script in the folder, and so every library that it imports, gets the real one."""
    code = "import http, http.client; print(http.__file__, http.HTTPStatus.OK, http.client.__name__)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); {code}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert not printed[0].startswith(str(BENCHMARKS))
    assert printed[1:] == ["200", "http.client"]
