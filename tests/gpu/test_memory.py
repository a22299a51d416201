"""Peak memory of a constrained selection grows with its candidates, not with width times vocabulary."""

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu


def peak_bytes(columns: int, children: int, width: int = 900) -> int:
    """Bytes that one selection takes beside its inputs."""
    from grinf.backend.registry import Site, default_registry
    from grinf.ops.contracts import Limits, PathView, TrieView

    site = Site("cuda", 90, "bfloat16", 128, 2, 64)
    select = default_registry().choose("select_constrained", site).load(site)
    device, int32 = torch.device("cuda"), torch.int32
    parents = torch.arange(1, width + 1, dtype=int32, device=device)
    first = 1 + width + children * torch.arange(width + 1, dtype=int32, device=device)
    first_child = torch.cat([torch.tensor([1], dtype=int32, device=device), first])
    code = torch.cat([torch.zeros(1 + width, dtype=int32), torch.arange(children, dtype=int32).repeat(width)])
    table = torch.arange(children + 1, dtype=int32, device=device).repeat(2, 1)
    trie = TrieView(
        first_child,
        code.to(torch.int16).to(device),
        table,
        table,
        torch.full((2,), -1, dtype=int32, device=device),
        None,
        None,
        width * children,
    )
    one = torch.ones(1, dtype=int32, device=device)
    path = PathView(
        0 * one,
        torch.zeros(2, width, device=device),
        parents.repeat(2, 1),
        width * torch.tensor([1, 0], device=device, dtype=int32),
        width,
    )
    limits = Limits(one, width * one, one, torch.full((1,), np.inf, device=device), one, width)
    logits = torch.randn(1, width, columns, device=device, dtype=torch.bfloat16)
    log_z = torch.zeros(1, width, device=device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    selection = select(logits, path, trie, limits, "given", log_z)
    torch.cuda.synchronize()
    assert int(selection.count[0]) == width
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_follows_the_candidates() -> None:
    few, many = peak_bytes(151_936, 10), peak_bytes(151_936, 2_000)
    print(f"900 x 151,936 logits: {few:,} bytes for 9,000 candidates, {many:,} for 1,800,000")
    assert few < 4 << 20
    assert many < 8 * 1_800_000
    assert abs(peak_bytes(4_000, 2_000) - many) < 1 << 16, "the vocabulary does not matter"
