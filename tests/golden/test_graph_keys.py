"""The engine over captured shapes, with a fake in place of CUDA graphs: what is captured, what replayed."""

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import pytest
import torch

from grinf.backend import load
from tests.golden.test_engine import catalogue, prompts_of, recall


class Replayer:
    """Keeps each captured step and replays that one, as a graph does: what runs is what was captured."""

    captured: dict[Hashable, Callable[[], None]]
    replayed: list[Hashable]
    eager: list[Hashable]

    def __init__(self) -> None:
        type(self).captured, type(self).replayed, type(self).eager = {}, [], []

    def capture(self, key: Hashable, step: Callable[[], None]) -> None:
        assert key not in self.captured, "a shape is captured once"
        step()
        self.captured[key] = step

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        if key in self.captured:
            self.replayed.append(key)
            self.captured[key]()
        else:
            self.eager.append(key)
            step()


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "GraphRunner", Replayer)
    monkeypatch.setattr(load._Frame, "is_captured", property(lambda frame: frame.options.graphs))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("beams", [(8,), (3, 6, 12)])
@pytest.mark.parametrize("score", ["vocab", "children"])
def test_one_graph_serves_requests_of_any_length_step_and_slot(
    model_folder: Path, beams: tuple[int, ...], score: str
) -> None:
    rng = np.random.default_rng(0)
    _, trie, _ = catalogue(rng, 3, 60)
    prompts = prompts_of(rng, 5, 17, 1, 40, 23, 9, 31)
    found = recall(model_folder, trie, prompts, beams=beams, score=score)
    decodes = [key for key in Replayer.replayed if key.phase == "decode"]
    assert not [key for key in Replayer.eager if key.phase == "decode"], "every decode has its graph"
    assert len(set(decodes)) < len(decodes), "graphs are used again"
    exact = recall(model_folder, trie, prompts, beams=beams, score=score, graphs=False)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_array_equal(one.sids, other.sids)
        np.testing.assert_allclose(one.scores, other.scores, atol=1e-5)


@pytest.mark.usefixtures("replaying")
def test_shapes_outside_the_buckets_run_eagerly_and_right(model_folder: Path) -> None:
    """The reference prefill takes its borders from the host, so no prefill is captured on a CPU."""
    rng = np.random.default_rng(1)
    _, trie, _ = catalogue(rng, 3, 60)
    prompts = prompts_of(rng, 7, 12)
    found = recall(model_folder, trie, prompts, beams=(8,))
    assert {key.phase for key in Replayer.eager} == {"prefill"}
    assert {key.phase for key in Replayer.captured} == {"decode"}
    exact = recall(model_folder, trie, prompts, beams=(8,), graphs=False)
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_array_equal(one.sids, other.sids)
