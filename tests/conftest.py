"""What every test shares: the GPU gate, the hypothesis profile, and where the repository is."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("grinf", deadline=None, max_examples=100, derandomize="CI" in os.environ)
settings.load_profile("grinf")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job's, and its children's
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the working tree."""
    return Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-instances", action="store_true", help="compile every kernel instance with nvcc")


@pytest.hookimpl(
    trylast=True
)  # After `-m "not gpu"`, so that a run without GPU tests does not import torch here.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    missing = _missing_for_gpu() if gpu_items else ""
    for item in gpu_items:
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


def _missing_for_gpu() -> str:
    """Say what a GPU test lacks here; empty if nothing."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if find_spec("cupy") is None:
        return "CuPy is not installed"
    print(f"GPU tests run on {torch.cuda.get_device_name()}")
    return ""
