"""For tests of the command line: running it in this process, and shards for its examples."""

import io
import itertools
import json
import shlex
import sys
import tarfile
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from PIL import Image

from tests.kits.shards import sample_members, write_tar
from torchdata_wds.cli.main import main
from torchdata_wds.storage.sources.local import StandardInput

__all__ = ["EXAMPLE_SAMPLES", "Result", "read_samples", "run_line", "run_wds", "write_example_folder"]

EXAMPLE_SAMPLES = 40
SHELL_SIGNS = frozenset((">", "<", "&&", "||", ";", "&"))

AUGMENT = '''"""Work on a shard, for ``wds map``."""

from torchdata_wds import TarWriter, WebDataset


def augment(source: str, target: str) -> None:
    """Mirrors all images of a shard."""
    with TarWriter(target) as writer:
        for sample in WebDataset(source, decoder="pil"):
            sample["jpg"] = sample["jpg"].transpose(0)
            writer.write(sample)
'''

PIPES = '''"""A module for wds bench."""

from torchdata_wds import WebDataset, wds_collate


def training_pipe():
    """The pipe of a training script."""
    return WebDataset("train-{000000..000003}.tar", decoder="rgb8").batch(8).collate(wds_collate)
'''


class Result(NamedTuple):
    """What a command did.

    Attributes:
        status: Its exit status.
        out: What it wrote to standard output.
        err: What it wrote to standard error.
    """

    status: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.out.decode()


def run_wds(*arguments: object, stdin: bytes = b"") -> Result:
    """Runs a command in this process."""
    raw, errors = io.BytesIO(), io.StringIO()
    output = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(output))
        stack.enter_context(redirect_stderr(errors))
        given = io.TextIOWrapper(io.BytesIO(stdin))
        stack.enter_context(mock.patch.object(sys, "stdin", given))
        stack.enter_context(mock.patch.object(StandardInput, "taken", False))
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # argparse
            status = ended.code if isinstance(ended.code, int) else 1
        output.flush()
    return Result(status, raw.getvalue(), errors.getvalue())


def run_line(line: str) -> Result | None:
    """Runs a line for a shell in this process; None for one with anything but commands of ours and pipes."""
    words = shlex.split(line)
    commands = [list(group) for is_pipe, group in itertools.groupby(words, lambda word: word == "|") if not is_pipe]
    if any(command[0] != "wds" for command in commands) or not SHELL_SIGNS.isdisjoint(words):
        return None
    out, errors, status = b"", "", 0
    for command in commands:
        done = run_wds(*command[1:], stdin=out)
        out, errors, status = done.out, errors + done.err, status or done.status
    return Result(status, out, errors)


def read_samples(source: Path | str | bytes) -> list[dict[str, Any]]:
    """The samples of an archive in order, by the standard library: consecutive members with one key, as bytes."""
    file = io.BytesIO(source if isinstance(source, bytes) else Path(source).read_bytes())
    samples: list[dict[str, Any]] = []
    with tarfile.open(fileobj=file) as tar:
        for info in tar:
            folder, slash, base = info.name.rpartition("/")
            stem, _, field = base.partition(".")
            content = tar.extractfile(info)
            assert content is not None
            if not samples or samples[-1]["__key__"] != folder + slash + stem:
                samples.append({"__key__": folder + slash + stem})
            assert field not in samples[-1]
            samples[-1][field] = content.read()
    return samples


def write_example_folder(folder: Path) -> None:
    """Writes what the examples in the help are about.

    ``train-{000000..000003}.tar`` have ten samples each with jpg, cls, json and txt; ``damaged.tar`` is cut in its
    middle; ``images/`` is a folder of pairs, ``recipe.txt`` and ``plan.tsv`` describe archives of them; ``augment.py``
    is a module for ``wds map``, and ``pipes.py`` one for ``wds bench``.
    """
    for shard in range(4):
        members = []
        for number in range(10 * shard, 10 * shard + 10):
            members += sample_members(
                f"{shard}/{number:06d}",
                cls=b"%d" % (number * 7 % 10),
                jpg=_image(number),
                json=json.dumps({"number": number, "label": number * 7 % 10}).encode(),
                txt=f"picture {number}".encode(),
            )
        path = write_tar(folder / f"train-{shard:06d}.tar", members)
    data = Path(path).read_bytes()
    (folder / "damaged.tar").write_bytes(data[: len(data) // 2])
    _write_sources(folder)


def _image(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 48), (number * 6, 255 - number * 6, 128)).save(out, "JPEG")
    return out.getvalue()


def _write_sources(folder: Path) -> None:
    recipe, plan = [], ["__key__\t@jpg\ttxt"]
    for number, name in enumerate(("cat/1", "cat/2", "dog/1")):
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".jpg").write_bytes(_image(number))
        path.with_suffix(".txt").write_text(f"this is {name}")
        recipe += [f"{name}.jpg images/{name}.jpg", f"{name}.cls text:{number}"]
        plan.append(f"{name}\timages/{name}.jpg\tthis is {name}")
    (folder / "recipe.txt").write_text("\n".join(recipe) + "\n")
    (folder / "plan.tsv").write_text("\n".join(plan) + "\n")
    (folder / "augment.py").write_text(AUGMENT)
    (folder / "pipes.py").write_text(PIPES)
