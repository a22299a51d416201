import pytest
import torch

from grinf.backend.registry import (
    OPS,
    PARTS,
    Implementation,
    KernelRegistry,
    Needs,
    reference_implementations,
)
from grinf.errors import UsageError
from grinf.jobs.bench import kernels


def quiet(stage, done, total):
    pass


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_a_wrong_kernel(monkeypatch):
    def wrong(gate_up):
        return gate_up[:, : gate_up.shape[1] // 2] * 1.5

    added = Implementation("swiglu", "wrong", Needs(), 5, lambda site: wrong)
    registry = KernelRegistry([*reference_implementations(), added])
    monkeypatch.setattr(kernels, "default_registry", lambda: registry)


def test_every_op_has_a_case_and_its_reference_is_timed(on_cpu):
    results = kernels.run_kernel_bench(None, quiet)
    timed = [result for result in results if result.us is not None]
    assert {result.op for result in timed} == {*OPS, *PARTS}
    for result in timed:
        assert result.name == "torch"
        assert result.error == 0
        assert result.us > 0
        assert result.gb_per_s > 0
        assert result.ceiling > 0
    for result in results:
        assert (result.us is None) == bool(result.note)


def test_a_wrong_kernel_is_told_and_never_timed(on_cpu, with_a_wrong_kernel):
    wrong, reference = kernels.run_kernel_bench("swiglu", quiet)
    assert wrong.note.startswith("WRONG")
    assert wrong.us is None
    assert reference.us is not None


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("kind", ["nan", "missing", "cut"])
def test_a_fault_in_any_result_is_found(on_cpu, monkeypatch, which, kind):
    """A number is never larger than NaN, so that the largest of several errors can hide one."""
    (reference,) = (one for one in reference_implementations() if one.op == "context_attention")

    def faulty(site):
        right = reference.load(site)

        def call(*args):
            out = list(right(*args))
            out[which] = {"nan": out[which] * torch.nan, "cut": out[which][:1]}.get(kind)
            return tuple(value for value in out if value is not None)

        return call

    added = Implementation("context_attention", "faulty", Needs(), 5, faulty)
    registry = KernelRegistry([*reference_implementations(), added])
    monkeypatch.setattr(kernels, "default_registry", lambda: registry)
    results = {result.name: result for result in kernels.run_kernel_bench("context_attention", quiet)}
    assert results["faulty"].note.startswith("WRONG")
    assert results["faulty"].us is None
    assert results["torch"].us is not None


def test_an_unknown_op_names_the_nearest():
    with pytest.raises(UsageError, match="unknown op"):
        kernels.run_kernel_bench("decode_atention", quiet)
