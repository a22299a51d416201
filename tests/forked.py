"""`grinf` in processes that have imported everything before: real ones, but for the seconds to start them."""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["grinf.cli.recall", "grinf.jobs.recall", "transformers", "tests.forked"])


class Job:
    """A command line in a process of its own; much like `subprocess.Popen`.

    Args:
        arguments: Words after `grinf`.
        folder: Working directory.
        ignored: Signals that the process ignores from the start, as under nohup.
    """

    def __init__(self, *arguments: object, folder: Path, ignored: Sequence[signal.Signals] = ()) -> None:
        self._files = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        words = list(map(str, arguments))
        self._process = CONTEXT.Process(
            target=_run, args=(words, str(folder), str(self._files), ignored), daemon=True
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._read("out")

    @property
    def stderr(self) -> str:
        return self._read("err")

    @property
    def peak_bytes(self) -> int:
        """Most resident memory that it had, after it has ended by itself."""
        return int(self._read("peak")) * 1024

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 120) -> "Job":
        self._process.join(timeout_s)
        assert self.returncode is not None, "it does not end"
        return self

    def _read(self, name: str) -> str:
        path = self._files / name
        return path.read_text() if path.exists() else ""


def _run(words: list[str], folder: str, files: str, ignored: Sequence[signal.Signals]) -> None:
    from grinf.cli.app import main

    for number, name in ((1, "out"), (2, "err")):
        handle = os.open(f"{files}/{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    for name in [name for name in os.environ if name.startswith("GRINF_")]:
        del os.environ[name]
    os.chdir(folder)
    code = main(words)
    Path(files, "peak").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    sys.exit(code)
