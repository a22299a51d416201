"""Random decode attention problems in which what may not be read is NaN, and their float64 answers."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """One call. live, lengths, steps: width, context length and decode step of each request."""

    live: tuple[int, ...] = (67,)
    lengths: tuple[int, ...] = (300,)
    steps: tuple[int, ...] = (1,)
    beams: int = 70
    decode_steps: int = 2
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Inputs:
    """The arguments of `decode_attention`, in its order but for `out`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    context_len: Tensor
    k_beams: Tensor
    v_beams: Tensor
    slot: Tensor
    ancestor: Tensor
    step: Tensor
    width: Tensor
    scale: float


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Draw queries (rows of a QKV projection), keys and values, shuffled pages, slots and ancestors."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(case.dtype)

    def shuffled(n: int) -> Tensor:
        return torch.randperm(n, generator=generator, device="cuda")

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=case.dtype, device="cuda")

    batch, heads = len(case.live), (case.kv_heads, case.head_dim)
    pages_each = max(1, -(-max(case.lengths) // case.page_size))
    num_pages, max_width = batch * pages_each + 2, case.beams + 5
    pages = [poison(num_pages + 1, case.page_size, *heads) for _ in "kv"]
    own = [poison(batch + 3, case.decode_steps, max_width, *heads) for _ in "kv"]
    page_table = torch.full((batch, pages_each + 1), num_pages, dtype=torch.int32, device="cuda")
    page_table[:, :pages_each] = shuffled(num_pages)[: batch * pages_each].view(batch, pages_each)
    slot = shuffled(batch + 2)[:batch]
    ancestor = torch.randint(
        max_width, (batch, case.decode_steps, case.beams), generator=generator, device="cuda"
    )
    for b in range(batch):
        for pool in pages:
            pool[context_rows(case, page_table, b)] = normal(case.lengths[b], *heads)
        for pool in own:
            pool[slot[b], : case.steps[b] + 1] = normal(case.steps[b] + 1, max_width, *heads)
        ancestor[b, case.steps[b]] = torch.arange(case.beams, device="cuda")
    qkv = normal(batch * case.beams, (case.q_heads + 2 * case.kv_heads) * case.head_dim)
    q = qkv[:, : case.q_heads * case.head_dim].view(batch, case.beams, case.q_heads, case.head_dim)
    context_len, step, width = (
        torch.tensor(numbers, dtype=torch.int32, device="cuda")
        for numbers in (case.lengths, case.steps, case.live)
    )
    tables = page_table, context_len, *own, slot.int(), ancestor.int(), step, width
    return Inputs(q, *pages, *tables, case.head_dim**-0.5)


def context_rows(case: Case, page_table: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Page and row in the page of each context key of request b."""
    rows = torch.arange(case.lengths[b], device="cuda")
    return page_table[b, rows // case.page_size].long(), rows % case.page_size


def expected(case: Case, inputs: Inputs, b: int, parts: str) -> tuple[Tensor, Tensor]:
    """Attention of the live beams of request b to its `context`, its `own` keys, or both (`context own`).

    Returns:
        out: float64 [width, Hq, D]; lse: float64 [width, Hq], natural log.
    """
    live, q_heads = case.live[b], case.q_heads
    q = inputs.q[b, :live].double().unflatten(1, (case.kv_heads, -1))  # [w, h, g, D]
    scores, values, rules = [], [], []
    if "context" in parts:
        at = context_rows(case, inputs.page_table, b)
        scores.append(torch.einsum("whgd,jhd->whgj", q, inputs.k_pages[at].double()))
        values.append(inputs.v_pages[at].double())
        rules.append("whgj,jhd->whgd")
    if "own" in parts:
        steps = torch.arange(case.steps[b] + 1, device="cuda")
        at = inputs.slot[b].long(), steps[:, None], inputs.ancestor[b, : len(steps), :live].long()
        scores.append(torch.einsum("whgd,swhd->whgs", q, inputs.k_beams[at].double()))
        values.append(inputs.v_beams[at].double())
        rules.append("whgs,swhd->whgd")
    logits = torch.cat(scores, -1) * inputs.scale
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0.0)[..., None]).split(
        [s.shape[-1] for s in scores], -1
    )
    out = torch.zeros_like(q)
    for rule, weight, value in zip(rules, weights, values, strict=True):
        out += torch.einsum(rule, weight, value)
    return out.reshape(live, q_heads, case.head_dim), lse.reshape(live, q_heads)
