"""BeamPath: which beam came from which. The only place that knows parents; forking a beam copies no KV.

level          0          1          2
token      a0 a1 a2   b0 b1 b2   c0 c1 c2      as chosen at that level, never permuted
ancestor   of the live beams: for each decode step, the beam on its path.
           c1 <- b2 <- a0  is  ancestor[0][1] = 0, ancestor[1][1] = 2
"""

import torch
from torch import Tensor


class BeamPath:
    """Pools by beam slot; the last slot is scratch for padding requests and always has width 0.

    Attributes:
        token: int32 [slots + 1, levels, W_max].
        ancestor: int32 [slots + 1, T, W_max], T = levels - 1.
        cum: float32 [slots + 1, W_max], score so far, nats.
        node: int32 [slots + 1, W_max], trie node, 0 = root.
        width: int32 [slots + 1], live beams.
        mass: float32 [slots + 1], probability of the codes of level 0, where it is asked for.
    """

    def __init__(self, num_slots: int, levels: int, max_width: int, device: torch.device) -> None:
        def pool(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((num_slots + 1, *shape), dtype=dtype, device=device)

        self.scratch_slot, self.levels, self.max_width = num_slots, levels, max_width
        self.token = pool(levels, max_width)
        self.ancestor = pool(levels - 1, max_width)
        self.cum = pool(max_width, dtype=torch.float32)
        self.node = pool(max_width)
        self.width = pool()
        self.mass = pool(dtype=torch.float32)

    def start(self, slot: Tensor) -> None:
        """Give each request of int32 [B] one beam at the root: what a prefill searches from."""
        rows = slot.long()
        self.cum[:, 0].index_fill_(0, rows, 0.0)
        self.node[:, 0].index_fill_(0, rows, 0)
        self.width.index_copy_(0, rows, (slot != self.scratch_slot).to(torch.int32))

    def tokens_at(self, slot: Tensor, step: Tensor, width: int) -> Tensor:
        """Tokens that decode step `step` [B] feeds, int32 [B, width]."""
        return self.token[slot, step, :width]

    def gather_index(self, slot: Tensor, step: Tensor, width: int) -> Tensor:
        """Row of each step on each beam's path, int32 [B, T, width]; at the running step the beam itself."""
        ancestor = self.ancestor[slot, :, :width]
        steps = torch.arange(ancestor.shape[1], device=slot.device)[None, :, None]
        beam = torch.arange(width, dtype=torch.int32, device=slot.device)
        return torch.where(steps == step[:, None, None], beam, ancestor)

    def trace(self, slot: Tensor, width: int) -> Tensor:
        """Token ids of finished beams, int32 [B, width, levels], looked up through the parents."""
        token, last = self.token[slot, :, :width], self.token[slot, -1:, :width]
        ancestor = self.ancestor[slot, :, :width].long()
        earlier = self.token[slot, :-1].gather(2, ancestor) if token.shape[1] > 1 else token[:, :0]
        return torch.cat([earlier, last], dim=1).transpose(1, 2)
