"""A small demo, made once per run: one short chapter and few steps, but a trained checkpoint on real data.

A test module asks for it by `pytest_plugins = ["tests.demo_fixture"]`.
"""

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from grinf.config.settings import DemoSettings
from grinf.jobs.demo import DemoPlan, DemoReport, run_demo

PLAN = DemoPlan(frozenset({3}), steps=220, max_compared=6)
"""Diseases of the blood: 401 items, 402 training queries, 93 test queries."""


@dataclass(frozen=True)
class SmallDemo:
    """Where the demo was run, and what it reported; the report's paths are relative to the folder."""

    folder: Path
    report: DemoReport
    plan: DemoPlan

    @property
    def model(self) -> Path:
        return self.folder / self.report.model

    @property
    def trie(self) -> Path:
        return self.folder / self.report.trie

    @property
    def queries(self) -> Path:
        return self.folder / self.report.queries


@pytest.fixture(scope="session")
def small_demo(tmp_path_factory: pytest.TempPathFactory) -> SmallDemo:
    """A demo that all tests share: read it, never write to it."""
    if find_spec("simple_icd_10_cm") is None:
        pytest.skip("simple-icd-10-cm is not installed")
    folder = tmp_path_factory.mktemp("small_demo")
    with contextlib.chdir(folder):
        return SmallDemo(folder, run_demo(DemoSettings(), lambda stage, done, total: None, PLAN), PLAN)
