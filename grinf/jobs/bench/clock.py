"""Time of a probe: the clock of the machine, or a virtual one that only a simulated engine moves."""

import time

SPIN_NS = 400_000
"""The last stretch before a deadline is spun: the operating system wakes a sleeper up to this much late."""


class Clock:
    """`time.perf_counter_ns`, the clock of every `Timeline`."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary origin."""
        return time.perf_counter_ns()

    def sleep_until(self, deadline_ns: int) -> None:
        """Return at the deadline or as soon after it as can be: sleep, then spin."""
        if (rest := deadline_ns - SPIN_NS - time.perf_counter_ns()) > 0:
            time.sleep(rest / 1e9)
        while time.perf_counter_ns() < deadline_ns:
            pass


class VirtualClock(Clock):
    """A clock that stands still until somebody sleeps."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Virtual nanoseconds."""
        return self._now_ns

    def sleep_until(self, deadline_ns: int) -> None:
        """Jump to the deadline."""
        self._now_ns = max(self._now_ns, deadline_ns)
