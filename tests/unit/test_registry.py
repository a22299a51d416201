"""One table at start, or a reason for every candidate."""

from dataclasses import replace

import pytest

from grinf.backend.registry import (
    OPS,
    Implementation,
    KernelRegistry,
    Needs,
    Site,
    default_registry,
    reference_implementations,
)
from grinf.errors import KernelUnavailable, UsageError

CPU = Site("cpu", None, "float32", 64, 2, 64)
HOPPER = Site("cuda", 90, "bfloat16", 128, 2, 64)


def named(op: str, name: str, needs: Needs, rank: int) -> Implementation:
    return Implementation(op, name, needs, rank, lambda site: lambda: (name, site))


FAST = named("swiglu", "fast", Needs("cuda", sm_min=80, dtypes=("bfloat16",)), 10)
HOPPER_ONLY = named(
    "swiglu", "hopper", Needs("cuda", sm_min=90, sm_max=90, head_dims=(128,), groups=(1, 2)), 20
)
BROKEN = named("swiglu", "library", Needs("cuda", missing="CuPy is not installed"), 30)


def test_the_reference_serves_every_op_on_a_cpu() -> None:
    ops = default_registry().resolve(CPU)
    assert set(ops.names) == set(OPS)
    assert set(ops.names.values()) == {"torch"}


def test_the_best_that_fits_wins() -> None:
    registry = KernelRegistry([FAST, HOPPER_ONLY, BROKEN])
    assert registry.choose("swiglu", HOPPER).name == "hopper"
    ada = Site("cuda", 89, "bfloat16", 128, 2, 64)
    assert registry.choose("swiglu", ada).name == "fast"
    wide_group = Site("cuda", 90, "bfloat16", 128, 16, 64)
    assert registry.choose("swiglu", wide_group).name == "fast"


def test_every_rejected_candidate_is_named_with_its_reason() -> None:
    with pytest.raises(KernelUnavailable) as caught:
        KernelRegistry([FAST, HOPPER_ONLY, BROKEN]).choose("swiglu", Site("cuda", 75, "float16", 96, 4, 64))
    said = str(caught.value)
    for part in (
        "library: CuPy is not installed",
        "hopper: needs compute capability 9.0",
        "fast: needs compute",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (CPU, "needs a cuda device"),
        (Site("cuda", 90, "float32", 128, 2, 64), "dtype float32 is not among bfloat16"),
    ],
)
def test_reasons(site: Site, reason: str) -> None:
    assert FAST.needs.rejects(site) == reason


@pytest.mark.parametrize(
    "site",
    [
        Site("cuda", 75, "bfloat16", 128, 2, 64),
        Site("cuda", 90, "bfloat16", 96, 2, 64),
        Site("cuda", 90, "float16", 128, 2, 64),
    ],
)
def test_a_gpu_never_falls_back_to_the_reference(site: Site) -> None:
    """This machine lacks CuPy, so that no kernel fits: it is said, and the reference must be asked for."""
    registry = KernelRegistry([*reference_implementations(), FAST, BROKEN])
    with pytest.raises(KernelUnavailable, match="torch: is the slow reference") as caught:
        registry.choose("add_rms_norm", site)
    assert f"capability {site.sm / 10:.1f}" in str(caught.value)
    assert registry.choose("add_rms_norm", site, "torch").name == "torch"
    assert registry.choose("add_rms_norm", replace(site, dtype="float32")).name == "torch"


def test_an_override_is_obeyed_or_refused() -> None:
    registry = KernelRegistry([FAST, HOPPER_ONLY])
    assert registry.choose("swiglu", HOPPER, "fast").name == "fast"
    with pytest.raises(UsageError, match="there are: hopper, fast"):
        registry.choose("swiglu", HOPPER, "quick")
    with pytest.raises(KernelUnavailable, match=r"hopper: needs compute capability 9\.0 or newer"):
        registry.choose("swiglu", Site("cuda", 80, "bfloat16", 128, 2, 64), "hopper")
    with pytest.raises(UsageError, match=r"kernels\.softmax is not an op"):
        default_registry().resolve(CPU, {"softmax": "torch"})
