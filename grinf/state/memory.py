"""How many pages and slots a memory budget holds. Arithmetic on integers: knows no tensor."""

from dataclasses import dataclass

from grinf.errors import CapacityError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values cost."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes of the pools, and what they were decided from.

    Attributes:
        num_pages, page_size: ContextKV, tokens per page.
        num_slots: Requests that can be in flight.
        context_bytes, beam_bytes: Bytes of ContextKV and BeamKV.
        budget_bytes: Bytes that the plan was given.
    """

    num_pages: int
    page_size: int
    num_slots: int
    context_bytes: int
    beam_bytes: int
    budget_bytes: int


def plan_memory(
    shape: KVShape,
    budget_bytes: int,
    page_size: int,
    max_context: int,
    num_steps: int,
    max_width: int,
    max_slots: int,
) -> MemoryPlan:
    """Give as many requests as fit, up to `max_slots`, a beam slot and pages for their longest prompt.

    Raises:
        CapacityError: Not even one request fits.
    """
    pages_per_request = -(-max_context // page_size)
    page_bytes = page_size * shape.bytes_per_token
    slot_bytes = max(num_steps, 1) * max_width * shape.bytes_per_token
    scratch_bytes = page_bytes + slot_bytes
    per_request = pages_per_request * page_bytes + slot_bytes
    num_slots = min(max_slots, (budget_bytes - scratch_bytes) // per_request)
    if num_slots < 1:
        need, given = (f"{n / MIB:,.1f} MiB" for n in (per_request + scratch_bytes, max(budget_bytes, 0)))
        raise CapacityError(
            f"one request needs {need}, {given} are planned for KV",
            f"{max_width} beams x {num_steps} steps and a prompt of {max_context} tokens, "
            f"{shape.bytes_per_token} bytes a token, and as much again for scratch",
            "use fewer beams, a smaller --max-context, --workspace-bytes or model, or free memory",
        )
    return MemoryPlan(
        num_pages=num_slots * pages_per_request,
        page_size=page_size,
        num_slots=num_slots,
        context_bytes=(num_slots * pages_per_request + 1) * page_bytes,
        beam_bytes=(num_slots + 1) * slot_bytes,
        budget_bytes=budget_bytes,
    )
