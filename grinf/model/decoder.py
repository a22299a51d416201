"""The dense decoder (Qwen3, Qwen2, Llama) as one function of tokens. Knows no cache, phase or kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from grinf.model.config import ModelConfig

Attend = Callable[[int, Tensor], Tensor]
"""attend(layer, qkv [N, (Hq + 2 * Hkv) * D]) -> [N, Hq * D]: all between two projections of a layer."""


class ElementwiseOps(Protocol):
    """The ops around the matrix products that the caller injects; contracts in `grinf.ops.contracts`."""

    @property
    def add_rms_norm(self) -> Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]:
        """Residual add and RMSNorm."""
        ...

    @property
    def swiglu(self) -> Callable[[Tensor], Tensor]:
        """Gated activation."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; projections that read the same input are fused along their output axis.

    Attributes:
        qkv: [(Hq + 2 * Hkv) * D, hidden], queries first. gate_up: [2 * F, hidden], gates first.
        q_norm, k_norm: [D] or None.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All tensors of a decoder, on one device and in one dtype.

    Attributes:
        embed: [vocab_rows, hidden]. head: the same tensor where the checkpoint ties them.
    """

    embed: Tensor
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder ready to run."""

    config: ModelConfig
    weights: DecoderWeights

    def forward(
        self, tokens: Tensor, attend: Attend, ops: ElementwiseOps, last_rows: Tensor | None = None
    ) -> Tensor:
        """Return the normalised hidden states that feed the lm_head.

        Args:
            tokens: int32 [N], token ids of any number of sequences, packed.
            attend: Finishes q, k, v (norms, rotation), stores what must be stored, and attends.
            ops: Element-wise ops.
            last_rows: int64 [R]; rows to keep. Only these need the last layer's output projection and MLP.

        Returns:
            [N, hidden], or [R, hidden] with `last_rows`.
        """
        eps, weights = self.config.rms_norm_eps, self.weights
        x, residual = F.embedding(tokens, weights.embed), None
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            x, residual = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            x = attend(index, F.linear(x, layer.qkv, layer.qkv_bias))
            if index == last and last_rows is not None:
                x, residual = x[last_rows], residual[last_rows]
            x, residual = ops.add_rms_norm(F.linear(x, layer.o, layer.o_bias), residual, layer.post_norm, eps)
            x = ops.swiglu(F.linear(x, layer.gate_up, layer.gate_up_bias))
            x = F.linear(x, layer.down, layer.down_bias)
        return ops.add_rms_norm(x, residual, weights.final_norm, eps)[0]


def rotary_table(config: ModelConfig, positions: int, device: torch.device) -> Tensor:
    """Return float32 [positions, D]: the cosines of each position's angles, then the sines.

    Source: RoPE (Su et al., 2021); `llama3` scaling as in the Llama 3.1 release: long wavelengths are divided
    by `factor`, short ones kept, and those between are interpolated.
    """
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=device).float() / config.head_dim
    frequency = 1.0 / (config.rope_theta**exponent)
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_positions * frequency / (2 * torch.pi)
        smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        smooth = smooth.clamp(0.0, 1.0)
        frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
    angle = torch.arange(positions, device=device).float()[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
