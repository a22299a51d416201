"""Signals that end a job: the first one lets the running unit end, the second does not, no other counts."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from grinf.errors import ExitCode, StoppedError

GOES_ON = "the same command goes on where it stopped"

EXIT_CODES = {
    signal.SIGINT: ExitCode.INTERRUPTED,
    signal.SIGTERM: ExitCode.TERMINATED,
    signal.SIGHUP: ExitCode.HUNG_UP,
    signal.SIGUSR1: ExitCode.TERMINATED,  # How a cluster's scheduler announces that it will end the job.
}


class Signalled(BaseException):
    """A signal ends the job here and now. No `except Exception` on the way may take it."""


class Signals:
    """What was received.

    Attributes:
        first: The first signal; None: there was none.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._is_deferring = False

    @contextmanager
    def deferring(self) -> Generator[None]:
        """Let a first signal wait for the end of this block; a second one ends it at once.

        Raises:
            Signalled: There was a signal, before the block or within it.
        """
        self.check()
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        self.check()

    def check(self) -> None:
        """End the job if there was a signal; another one would only break into the clean-up.

        Raises:
            Signalled: There was one.
        """
        if self.first is not None:
            for number in EXIT_CODES:
                signal.signal(number, signal.SIG_IGN)
            raise Signalled

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """Take a signal.

        Raises:
            Signalled: It is the second one, or nothing asked it to wait.
        """
        is_second = self.first is not None
        self.first = self.first or signal.Signals(number)
        if is_second or not self._is_deferring:
            self.check()


@contextmanager
def catching_signals() -> Generator[Signals]:
    """Receive the signals that end a job, except those that the process ignores, as under nohup.

    Only the main thread receives signals: in another one nothing is changed.

    Raises:
        StoppedError: For a Signalled that nobody told better.
    """
    signals = Signals()
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in EXIT_CODES} if is_main else {}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in ours:
        signal.signal(number, signals.receive)
    try:
        yield signals
    except Signalled:
        assert signals.first is not None
        raise StoppedError(
            EXIT_CODES[signals.first], f"stopped by {signals.first.name}", fix=GOES_ON
        ) from None
    finally:
        for number in ours:
            signal.signal(number, before[number])
