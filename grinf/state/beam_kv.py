"""BeamKV: the keys and values of decoded tokens, private to each beam, step-major, appended and never moved.

k[layer][slot]   step 0: beam 0, beam 1, ..., beam W_max - 1     the level-0 tokens
                 step 1: beam 0, beam 1, ..., beam W_max - 1     the level-1 tokens
Beam w of step 1 whose parent was beam p reads rows (0, p) and (1, w): BeamPath says which, nothing is copied.
"""

import torch
from torch import Tensor


class BeamKV:
    """Pools of shape [layers, slots + 1, T, W_max, Hkv, D]; padding requests write to the last slot."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_steps: int,
        max_width: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots + 1, num_steps, max_width, num_kv_heads, head_dim)
        self.num_steps, self.max_width = num_steps, max_width
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [slots + 1, T, W_max, Hkv, D]."""
        return self.k[layer], self.v[layer]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, leading axes flattened, each [(slots + 1) * T * W_max, Hkv, D]."""
        return self.k[layer].flatten(0, 2), self.v[layer].flatten(0, 2)

    def row_index(self, slot: Tensor, step: Tensor, width: int) -> Tensor:
        """Row in `rows` of each beam of a batch, int64 [B, width]."""
        first = (slot.long() * self.num_steps + step) * self.max_width
        return first[:, None] + torch.arange(width, device=slot.device)
