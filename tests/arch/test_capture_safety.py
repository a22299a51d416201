"""The steps on fake tensors: a read of a value or a shape from data raises here."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map_only

from grinf.backend.buffers import BatchBuffers
from grinf.backend.registry import Site, default_registry
from grinf.backend.scoring import Columns, DeviceTrie, Scoring
from grinf.backend.steps import BackendState, decode_forward, prefill_forward, select_beams
from grinf.model.config import ModelConfig
from grinf.model.decoder import Decoder, DecoderWeights, LayerWeights, rotary_table
from grinf.state.beam_kv import BeamKV
from grinf.state.beam_path import BeamPath
from grinf.state.context_kv import ContextKV

LEVELS, WIDTH, VOCAB, HIDDEN, D = 3, 4, 30, 16, 8
OPS = default_registry().resolve(Site("cpu", None, "float32", D, 2, 4))
CPU = torch.device("cpu")


def config() -> ModelConfig:
    return ModelConfig(
        "qwen3",
        HIDDEN,
        24,
        2,
        4,
        2,
        D,
        VOCAB,
        64,
        1e-6,
        1e4,
        None,
        True,
        False,
        False,
        False,
        True,
        "float32",
    )


def make_state(score: str, constrained: bool) -> BackendState:
    def layer() -> LayerWeights:
        one, head = torch.ones(HIDDEN), torch.ones(D)
        qkv, gate_up = torch.randn(8 * D, HIDDEN), torch.randn(48, HIDDEN)
        o, down = torch.randn(HIDDEN, 4 * D), torch.randn(HIDDEN, 24)
        return LayerWeights(one, qkv, None, head, head, o, None, one, gate_up, None, down, None)

    embed = torch.randn(VOCAB, HIDDEN)
    weights = DecoderWeights(embed, [layer(), layer()], torch.ones(HIDDEN), embed)
    scoring = Scoring("vocab", embed, None, workspace_bytes=WIDTH * VOCAB * 4)
    scoring.score = score
    if constrained:
        int32 = torch.int32
        token = torch.arange(LEVELS * 5, dtype=int32).view(LEVELS, 5)
        scoring.trie = DeviceTrie(
            first_child=torch.tensor([1, 3, 5, 6, 7, 8, 10], dtype=int32),
            code=torch.tensor([0, 0, 2, 1, 3, 0, 2, 1, 0, 3], dtype=torch.int16),
            token=token,
            end_code=torch.tensor([-1, -1, -1], dtype=int32),
            leaf_offset=6,
        )
    return BackendState(
        Decoder(config(), weights),
        ContextKV(2, 6, 4, 2, D, torch.float32, CPU),
        BeamKV(2, 3, LEVELS - 1, WIDTH, 2, D, torch.float32, CPU),
        BeamPath(3, LEVELS, WIDTH, CPU),
        rotary_table(config(), 64, CPU),
        scoring,
    )


def fake(mode: FakeTensorMode, value: object) -> object:
    """A copy of any object tree with every tensor replaced by a fake one."""
    if isinstance(value, torch.Tensor):
        return mode.from_tensor(value)
    if isinstance(value, list | tuple | dict):
        return (
            tree_map_only(torch.Tensor, mode.from_tensor, value)
            if not _has_objects(value)
            else _rebuild(mode, value)
        )
    if hasattr(value, "__slots__") and hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: fake(mode, getattr(value, name)) for name in value.__dataclass_fields__})
    if type(value).__module__.startswith("grinf") and hasattr(value, "__dict__"):
        copy = object.__new__(type(value))
        copy.__dict__.update({name: fake(mode, item) for name, item in vars(value).items()})
        return copy
    return value


def _has_objects(value: object) -> bool:
    items = value.values() if isinstance(value, dict) else value
    return any(hasattr(item, "__dataclass_fields__") for item in items)  # type: ignore[union-attr]


def _rebuild(mode: FakeTensorMode, value: object) -> object:
    if isinstance(value, dict):
        return {key: fake(mode, item) for key, item in value.items()}
    return type(value)(fake(mode, item) for item in value)  # type: ignore[call-arg,attr-defined]


@pytest.mark.parametrize(
    ("score", "constrained"),
    [("vocab", True), ("children", True), ("topk", True), ("vocab", False), ("topk", False)],
)
def test_no_step_asks_the_device_for_a_value(score: str, constrained: bool) -> None:
    state = make_state(score, constrained)
    buf = BatchBuffers(2, 3, WIDTH, scratch_slot=3, device=CPU, tokens=10)
    with FakeTensorMode() as mode, torch.inference_mode():
        state, buf = fake(mode, state), fake(mode, buf)
        columns = Columns(state.model.weights.head, state.scoring.trie.token if constrained else None)
        hidden = prefill_forward(state, OPS, buf, (6, 4))
        assert hidden.shape == (2, 1, HIDDEN)
        first_codes = mode.from_tensor(torch.arange(3))
        select_beams(state, OPS, buf, hidden, columns, 2, first_codes)
        hidden = decode_forward(state, OPS, buf, WIDTH)
        assert hidden.shape == (2, WIDTH, HIDDEN)
        select_beams(state, OPS, buf, hidden, columns, capacity=5)


def test_the_check_can_fail() -> None:
    with FakeTensorMode() as mode, pytest.raises(DataDependentOutputException):
        mode.from_tensor(torch.zeros(2)).max().item()
