"""Child processes that work for this one: each has a pipe to it, ends with it, and tells it what went wrong.

The signals of a terminal are the parent's to handle: a child never meets them, and ends when its pipe does.
"""

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from grinf.backend.interface import EngineOptions
from grinf.config.settings import EngineSettings
from grinf.errors import EnvironmentFault, GrinfError

S = TypeVar("S", bound=EngineSettings)
Inbox = queue.SimpleQueue[Any]
Send = Callable[[object], None]
Body = Callable[..., None]
"""What a child does, called with the Inbox of what the parent sends, a Send to it, and the arguments."""

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
END_S = 5.0
"""Seconds that a child has to end by itself."""


class ChildDied(EnvironmentFault):
    """A child process ended without a word: it was killed, or it crashed."""


class Child:
    """A process that runs `body` and exchanges pickled messages with this one.

    Args:
        name: What it is called in messages.
        body: A function of a module; it must not return.
        args: Of the body.
    """

    def __init__(self, name: str, body: Body, *args: object) -> None:
        context = multiprocessing.get_context("spawn")  # A forked process could not use CUDA.
        self.name = name
        self.pipe, far_end = context.Pipe()
        self._process = context.Process(target=_run, args=(far_end, body, args), name=name, daemon=True)
        resource_tracker.ensure_running()  # It unblocks signals when it starts.
        # A child inherits what is blocked, so there is no moment at which Ctrl-C reaches it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self._process.start()
        finally:
            far_end.close()  # So that the pipe ends when the child does.
            self._unblock(before)

    def send(self, message: object) -> None:
        """Hand over a message; waits for nothing.

        Raises:
            ChildDied: There is nobody to take it.
        """
        try:
            self.pipe.send(message)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            ChildDied: It ended.
            GrinfError, OSError, MemoryError, RuntimeError: What the child failed with.
        """
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, BaseException):
            raise message
        return message

    def close(self) -> None:
        """End the process, whatever it does."""
        self.pipe.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def _unblock(self, before: Iterable[int]) -> None:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        except BaseException:  # Ctrl-C came meanwhile: nobody would know of this child.
            self.close()
            raise

    def _death(self) -> ChildDied:
        self._process.join(END_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return ChildDied(f"the process of {self.name} ended", f"its exit code is {code}")
        name = signal.Signals(-code).name
        why = "the system does that when memory runs out" if name == "SIGKILL" else "it crashed"
        return ChildDied(f"the process of {self.name} was ended by {name}", why)


def close_all(children: Sequence[Child]) -> None:
    """End children, all at the same time, and every one of them even if a signal interrupts that."""
    with ExitStack() as stack:
        for child in children:
            stack.callback(child.close)
        for child in children:
            child.pipe.close()


def settings_on(settings: S, device: str) -> S:
    """Settings of the engine on one of several devices; processes on the same one share its memory."""
    fraction = settings.memory_fraction or EngineOptions("").memory_fraction
    own = fraction / settings.devices.count(device)
    return settings.model_copy(update={"device": device, "memory_fraction": own})


def share_cores(processes: int) -> None:
    """Let torch use this process's share of the cores, unless the user says how many."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def _run(pipe: Connection, body: Body, args: tuple[Any, ...]) -> None:
    """Run a child: a thread reads the pipe, so that the parent never waits and its end is noticed at once."""
    inbox: Inbox = queue.SimpleQueue()

    def read() -> None:
        while True:
            try:
                inbox.put(pipe.recv())
            except (EOFError, OSError):
                os._exit(0)  # The parent closed the pipe, or is gone: nobody wants what is being done.

    threading.Thread(target=read, daemon=True).start()
    try:
        body(inbox, pipe.send, *args)
    except BaseException as error:  # Whatever it is, the parent tells it to the user.
        pipe.send(portable(error))
        threading.Event().wait()  # Until the parent has read it and closes the pipe.


def portable(error: BaseException) -> BaseException:
    """An error that can be sent: an unexpected one as text, with where it happened."""
    known = isinstance(error, GrinfError | OSError | MemoryError)
    portable = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note("".join(traceback.format_exception(error)))
    return portable
