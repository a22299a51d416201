"""Processes that work for another one: none is forgotten."""

from types import SimpleNamespace

import pytest

from grinf.jobs.processes import close_all


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("where", ["pipe", "close"])
def test_a_signal_while_processes_end_leaves_none_behind(which, where):
    closed = []

    def child(number):
        def end(step):
            if step == "close":
                closed.append(number)
            if (step, number) == (where, which):
                raise KeyboardInterrupt

        return SimpleNamespace(pipe=SimpleNamespace(close=lambda: end("pipe")), close=lambda: end("close"))

    with pytest.raises(KeyboardInterrupt):
        close_all([child(number) for number in range(3)])
    assert sorted(closed) == [0, 1, 2]
