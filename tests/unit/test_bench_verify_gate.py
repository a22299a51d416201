"""The gates of `--verify`: right engines pass on fresh seeds, broken ones do not (in full: benchmarks)."""

import pytest
import torch

from benchmarks import verify_gate
from benchmarks.verify_gate import ANSWERS, SELECTIONS, Setup, check


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return verify_gate.models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def faults_of(setup, models, seeds, count=8, fault=""):
    return [check(setup, models[setup.model], seed, count, fault).faults for seed in seeds]


@pytest.mark.parametrize(
    ("setup", "seeds"),
    [
        (Setup((16,)), range(100, 106)),
        (Setup((100,)), range(100, 103)),
        (Setup((16,), "float16"), range(100, 103)),
        (Setup((64,), "float32"), range(100, 103)),
        (Setup((64,), score="topk"), range(100, 103)),
        (Setup((64,), constrained=False), range(100, 102)),
        (Setup((8, 100, 300), model="deeper"), [502]),  # A beam was dropped for one that left no trace.
    ],
)
def test_right_engines_pass_on_fresh_seeds(models, setup, seeds):
    assert not any(faults_of(setup, models, seeds))


@pytest.mark.parametrize(
    ("beams", "seeds"), [((2, 16, 64), [33, 37, 96, 99]), ((4, 60, 300), [1, 12, 19, 96, 113])]
)
def test_a_near_tie_of_a_narrow_start_is_no_fault(models, beams, seeds):
    """Here another beam was kept at the first level, and with it went up to a tenth of the answer."""
    assert not any(faults_of(Setup(beams), models, seeds))


def test_large_logits_are_rounded_by_more(models):
    """A right engine is more than a quarter of a nat off, as the teacher is in the same dtype."""
    reports = [check(Setup((64,), model="peaked"), models["peaked"], seed, 8) for seed in range(3)]
    assert max(report.score_error for report in reports) > 0.25
    assert not any(report.faults for report in reports)


def test_few_sids_say_little_about_their_noise(models):
    assert not any(faults_of(Setup((1,)), models, range(40), count=1))


@pytest.mark.parametrize("fault", [*ANSWERS, *SELECTIONS])
@pytest.mark.parametrize(
    "setup",
    [Setup((64,), "float32"), Setup((64,)), Setup((4, 60, 300))],
    ids=["float32", "bfloat16", "narrow"],
)
def test_a_fault_is_found(models, setup, fault):
    """Beside 64 beams, the 64th one less is within what bfloat16 does to the border."""
    found = all(faults_of(setup, models, range(2), fault=fault))
    assert found is not (setup == Setup((64,)) and fault == "890 of 900")
