"""Every kernel file has its binding, and compiles for its architectures without spilling a register."""

import re
import shutil
import subprocess
from collections import defaultdict
from hashlib import sha256
from importlib import import_module
from itertools import product

import pytest

import kernels_cupy

SPILLS = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads",
    re.DOTALL,
)


def instances_of(stem):
    return import_module(f"kernels_cupy.{stem}").INSTANCES


def pytest_generate_tests(metafunc):
    """Name each compilation once: the entries of a file that share its constants are compiled together."""
    if "compilation" not in metafunc.fixturenames:
        return
    take_all = metafunc.config.getoption("--all-instances")
    entries = defaultdict(set)
    for instance in (i for stem in kernels_cupy.STEMS for i in instances_of(stem) if i.default or take_all):
        entries[instance.stem, instance.defines, instance.arches].add(instance.entry)
    names = ["-".join([stem, *(str(value) for _, value in defines)]) for stem, defines, _ in entries]
    metafunc.parametrize("compilation", [(*key, found) for key, found in entries.items()], ids=names)


def test_every_kernel_file_has_its_binding_and_every_binding_is_listed(repository):
    sources = {path.stem for path in (repository / "kernels_cupy").glob("*.cu")}
    assert sources == set(kernels_cupy.STEMS)


@pytest.mark.parametrize("stem", kernels_cupy.STEMS)
def test_every_kernel_file_has_a_default_instance(stem):
    assert {instance.stem for instance in instances_of(stem)} == {stem}
    assert any(instance.default for instance in instances_of(stem))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_kernel_compiles_and_spills_nothing(compilation, repository, tmp_path, request):
    stem, defines, arches, entries = compilation
    folder = repository / "kernels_cupy"
    command = ["nvcc", "-fatbin", "-std=c++17", "--threads=2", "-Xptxas=-v", "-I", str(folder)]
    command += [f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}" for arch in arches]
    command += [f"-D{name}={value}" for name, value in defines]
    command += [str(folder / f"{stem}.cu"), "-o"]
    texts = [path.read_bytes() for path in [*sorted(folder.glob("*.cuh")), folder / f"{stem}.cu"]]
    key = f"kernels/{sha256(b''.join(texts) + repr(command).encode()).hexdigest()}"
    if request.config.cache.get(key, None) == "compiled":
        return
    finished = subprocess.run([*command, str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    found = SPILLS.findall(finished.stdout + finished.stderr)
    assert {(entry, arch) for entry, arch, *_ in found} >= set(product(entries, arches))
    assert not [f"{entry} for {arch}" for entry, arch, *spilled in found if spilled != ["0", "0"]]
    request.config.cache.set(key, "compiled")
