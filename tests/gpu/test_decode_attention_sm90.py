"""Fused decode attention on Hopper against attention in float64, on inputs where everything unused is NaN."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from tests.gpu.attention_cases import Case, Inputs, expected, make_inputs
from tests.gpu.tolerances import ATTENTION

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

ONE = Case()
BATCH = Case(
    live=(67, 0, 1, 300, 64, 0),
    lengths=(100, 0, 1, 1000, 513, 77),
    steps=(1, 0, 0, 2, 1, 1),
    beams=300,
    decode_steps=3,
    q_heads=16,
    kv_heads=8,
)
SPLIT_BATCH = replace(ONE, lengths=(0, 5, 900, 2000), live=(20, 1, 32, 17), steps=(0, 1, 1, 0), beams=32)
WIDE = Case(live=(900, 899), lengths=(1000, 500), steps=(1, 0), beams=900, q_heads=16, kv_heads=8)
CASES = {
    "context_1": replace(ONE, lengths=(1,)),
    "no_context": replace(ONE, lengths=(0,)),
    "last_page_partial": replace(ONE, lengths=(64 * 3 + 7,)),
    "whole_block": replace(ONE, lengths=(128,)),
    "one_past_a_block": replace(ONE, lengths=(257,)),
    "width_1": replace(ONE, live=(1,), beams=1),
    "first_step": replace(ONE, steps=(0,)),
    "seven_steps": replace(ONE, steps=(6,), decode_steps=7),
    "group_1": replace(ONE, q_heads=2, live=(130,), beams=130, steps=(2,), decode_steps=3),
    "group_4": replace(ONE, q_heads=8, steps=(4,), decode_steps=7),
    "group_8": replace(ONE, q_heads=16, steps=(6,), decode_steps=7),
    "head_dim_64": replace(ONE, head_dim=64),
    "head_dim_64_group_1": replace(ONE, head_dim=64, q_heads=2, live=(200,), beams=200),
    "head_dim_64_wide": replace(WIDE, head_dim=64),
    "fp16": replace(ONE, dtype=torch.float16),
    "fp16_head_dim_64": replace(ONE, dtype=torch.float16, head_dim=64),
    "page_16": replace(ONE, page_size=16, lengths=(203,)),
    "page_32": replace(ONE, page_size=32),
    "page_128": replace(ONE, page_size=128),
    "page_256": replace(ONE, page_size=256, lengths=(700,)),
    "batch": BATCH,
    "splits": replace(ONE, lengths=(1500,), live=(20,), beams=20),
    "splits_batch": SPLIT_BATCH,
    "wide": WIDE,
    "wide_alone": replace(WIDE, live=(900,), lengths=(1000,), steps=(2,), decode_steps=3),
    "wide_seven_steps": replace(WIDE, steps=(6, 4), decode_steps=7),
    "width_4096": Case(live=(4096,), lengths=(260,), beams=4096),
    "many_tiles_a_block": replace(
        WIDE, live=(900,) * 8, lengths=(100, 90, 300, 128, 64, 1, 0, 257), steps=(1, 0) * 4
    ),
}


def attend(inputs: Inputs) -> Tensor:
    """Run the kernel over a poisoned output."""
    from kernels_cupy.decode_attention_sm90 import decode_attention

    out = torch.full(inputs.q.shape, torch.nan, dtype=inputs.q.dtype, device="cuda")
    decode_attention(*(getattr(inputs, field.name) for field in fields(Inputs)), out)
    return out


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name):
    case = CASES[name]
    inputs = make_inputs(case)
    out = attend(inputs)
    pairs = [
        (out[b, :live].double(), expected(case, inputs, b, "context own")[0])
        for b, live in enumerate(case.live)
    ]
    result, truth = (torch.cat([side.flatten() for side in sides]) for sides in zip(*pairs, strict=True))
    limit = ATTENTION[case.dtype]
    assert (result - truth).abs().max() <= limit.absolute
    assert (result - truth).norm() <= limit.relative * truth.norm()


def test_rows_past_the_width_are_left_alone():
    out = attend(make_inputs(BATCH))
    for b, live in enumerate(BATCH.live):
        assert not out[b, :live].isnan().any()
        assert out[b, live:].isnan().all()


@pytest.mark.parametrize("case", [BATCH, SPLIT_BATCH], ids=["whole", "split"])
def test_same_bits_every_time_and_in_any_batch_position(case):
    inputs = make_inputs(case)
    first, order = attend(inputs), torch.arange(len(case.live) - 1, -1, -1, device="cuda")
    per_request = ("q", "page_table", "context_len", "slot", "ancestor", "step", "width")
    moved = attend(replace(inputs, **{name: getattr(inputs, name)[order] for name in per_request}))
    again = attend(inputs)
    for b, live in enumerate(case.live):
        assert torch.equal(first[b, :live], moved[len(case.live) - 1 - b, :live])
        assert torch.equal(first[b, :live], again[b, :live])


@pytest.mark.parametrize("case", [BATCH, SPLIT_BATCH], ids=["whole", "split"])
def test_replays_in_a_graph_with_other_requests(case):
    static, fresh = make_inputs(case), make_inputs(case, seed=1)
    attend(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(static)
    for field in fields(Inputs):
        if field.name != "scale":
            getattr(static, field.name).copy_(getattr(fresh, field.name))
    graph.replay()
    eager = attend(fresh)
    for b, live in enumerate(case.live):
        assert torch.equal(out[b, :live], eager[b, :live])


@pytest.mark.parametrize(
    ("case", "named"),
    [
        (replace(ONE, head_dim=32), "of 32"),
        (replace(ONE, q_heads=6), "6 query and 2 key heads"),
        (replace(ONE, page_size=24), "page_size 24"),
    ],
)
def test_what_has_no_instance_is_named(case, named):
    with pytest.raises(ValueError, match=named):
        attend(make_inputs(case))
