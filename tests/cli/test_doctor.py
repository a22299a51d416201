"""`grinf doctor`: what it finds, what fails, and what a CuPy that does not fit torch looks like."""

import json
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from grinf.backend.registry import OPS
from grinf.cli import doctor
from grinf.config.settings import DoctorSettings
from grinf.errors import ExitCode
from grinf.jobs.bench.plan import shipped_model


def run(folder, *arguments):
    command = [sys.executable, "-m", "grinf", "doctor", "--json", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    document = json.loads(finished.stdout)
    assert document["exit_code"] == finished.returncode
    return document


def test_it_lists_the_software_the_disk_and_an_implementation_of_every_op(tmp_path):
    document = run(tmp_path, "--device", "cpu")
    checks = {check["name"]: check for check in document["data"]["checks"]}
    assert {"python", "torch", "cupy", "disk", "model", "trie"} <= set(checks)
    assert [checks[f"{op} (cpu, float32)"]["status"] for op in OPS] == ["ok"] * len(OPS)
    assert not [check for check in checks.values() if check["status"] == "fail"]
    assert document["exit_code"] == ExitCode.OK


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_asked_for_and_absent_fails(tmp_path):
    document = run(tmp_path, "--device", "cuda:0")
    (failed,) = [check for check in document["data"]["checks"] if check["status"] == "fail"]
    assert failed["name"] == "gpu"
    assert "cuda:0" in failed["found"]
    assert document["exit_code"] == ExitCode.ENVIRONMENT


def test_files_of_grinf_toml_that_cannot_be_read_fail(tmp_path):
    (tmp_path / "grinf.toml").write_text('model = "no_such_model"\ntrie = "items.grtrie"\n')
    (tmp_path / "items.grtrie").write_bytes(b"not a trie")
    document = run(tmp_path)
    failed = {check["name"]: check for check in document["data"]["checks"] if check["status"] == "fail"}
    assert set(failed) == {"model", "trie"}
    assert "no_such_model" in failed["model"]["found"]
    assert "items.grtrie" in failed["trie"]["found"]
    assert document["exit_code"] == ExitCode.ENVIRONMENT


def test_what_the_engine_would_refuse_fails(tmp_path):
    (tmp_path / "model").mkdir()
    shutil.copy(shipped_model("tiny"), tmp_path / "model" / "config.json")
    document = run(tmp_path, "--model", "model", "--kernels", "foo=bar,swiglu=nope")
    failed = {check["name"]: check for check in document["data"]["checks"] if check["status"] == "fail"}
    assert set(failed) == {"model", "foo", "swiglu (cpu, float32)"}
    assert "has no weights" in failed["model"]["found"]
    assert "foo=bar" in failed["foo"]["found"]
    assert document["exit_code"] == ExitCode.ENVIRONMENT


@pytest.mark.parametrize(
    ("installed", "torch_cuda", "status", "told"),
    [
        ({}, None, "ok", "CPU build"),
        ({}, "13.0", "warn", "grinf[cuda13]"),
        ({"cupy-cuda13x": "14.2.0"}, "13.0", "ok", "14.2.0 for cuda13"),
        ({"cupy-cuda12x": "14.2.0"}, "13.0", "fail", "pip uninstall cupy-cuda12x"),
        ({"cupy-cuda12x": "13.6.0"}, "12.8", "fail", "14 or newer"),
    ],
)
def test_cupy_must_fit_torch(monkeypatch, installed, torch_cuda, status, told):
    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    check = doctor._cupy(torch_cuda)
    assert check.status == status
    assert told in f"{check.found} {check.fix}"


def test_an_implementation_that_cannot_run_here_fails():
    settings = DoctorSettings(kernels=("decode_attention=cupy",), device="cpu")
    from grinf.backend.registry import default_registry

    if len(default_registry().candidates("decode_attention")) == 1:
        pytest.skip("no other implementation is registered")
    statuses = {check.name: check.status for check in doctor._kernels(settings)}
    assert statuses["decode_attention (cpu, float32)"] == "fail"
