"""ContextKV: the keys and values of prompts, once per request, paged, read by every beam of that request.

k[layer]   page 0      page 1      ...   page n - 1   scratch page
           |<- page_size rows ->|                     padding tokens write here
request A leases pages 7, 2: its key j is row j % page_size of page (7, 2)[j // page_size]
"""

import torch
from torch import Tensor


class ContextKV:
    """Pools of shape [layers, pages + 1, page_size, Hkv, D]; padding tokens write to the last page."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.page_size, self.scratch_page = page_size, num_pages
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [pages + 1, page_size, Hkv, D]."""
        return self.k[layer], self.v[layer]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer with pages flattened, each [(pages + 1) * page_size, Hkv, D]."""
        return self.k[layer].flatten(0, 1), self.v[layer].flatten(0, 1)
