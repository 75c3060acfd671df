"""Forks the ranks of scripts from a process that has imported their framework: see `framework_kit.RankServer`."""

import gc
import importlib
import json
import os
import runpy
import sys
from contextlib import suppress


def fork_rank(request: dict[str, object], environment: dict[str, str], files: list[str]) -> int:
    """Returns the pid of a rank to the server; the rank itself returns 0, with its own files and environment."""
    if pid := os.fork():
        return pid
    os.chdir(str(request["folder"]))
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return 0


def serve() -> None:
    """Runs scripts as ranks for each line of standard input, and answers with their exit codes.

    A rank leaves this function and the program like any script: by its end, an exception or a signal.
    """
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        pids = []
        for environment, files in zip(request["environments"], request["files"], strict=True):
            pid = fork_rank(request, environment, files)
            if not pid:
                sys.argv = [request["script"], *request["arguments"]]
                runpy.run_path(request["script"], run_name="__main__")
                return
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        sys.stdout.write(f"{json.dumps(codes)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with suppress(ModuleNotFoundError):  # a script that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    serve()
