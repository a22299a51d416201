"""What a result depends on beside the settings: versions, machine, GPU; only read, never changed."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from grinf import __version__

PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "transformers", "numpy", "pyarrow", "matplotlib")
SHOWN_VARIABLES = re.compile(
    r"(CUDA|NVIDIA_VISIBLE|TORCH|PYTORCH|GRINF|OMP|NCCL)_(?!.*(TOKEN|KEY|SECRET|PASSWORD))"
)
GPU_FIELDS = (
    "name,index,uuid,driver_version,memory.total,mig.mode.current,ecc.mode.current,persistence_mode,power.limit,"
    "clocks.max.sm,clocks.applications.graphics,clocks.sm,temperature.gpu,pcie.link.gen.current"
)


def describe_environment(devices: Sequence[str]) -> dict[str, Any]:
    """Versions, processor, the GPUs of `devices`, who else is on them, and the variables that matter."""
    cpu = re.search(r"model name\s*:\s*(.+)", _read(Path("/proc/cpuinfo")))
    shown = {name: value for name, value in sorted(os.environ.items()) if SHOWN_VARIABLES.match(name)}
    installed = {dist.name: dist.version for dist in metadata.distributions() if dist.name in PACKAGES}
    gpus = used_gpus(_nvidia_smi("gpu", GPU_FIELDS), devices, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    processes = _nvidia_smi("compute-apps", "pid,used_memory,gpu_uuid") if gpus else []
    return {
        "grinf": __version__,
        "git": _run("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "argv": ["grinf", *sys.argv[1:]],
        "python": platform.python_version(),
        "packages": installed,
        "os": platform.platform(),
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "gpus": gpus,
        "gpu_processes": [row for row in processes if row.get("gpu_uuid") in {gpu["uuid"] for gpu in gpus}],
        "variables": shown,
    }


def used_gpus(gpus: list[dict[str, str]], devices: Sequence[str], visible: str) -> list[dict[str, str]]:
    """Those of a machine's GPUs that `devices` (cpu, auto, cuda:1) means; all where that cannot be told.

    Args:
        gpus: Rows with `index` and `uuid`, in the machine's order.
        devices: As given to --devices; they count within what is visible.
        visible: CUDA_VISIBLE_DEVICES: indices, or beginnings of UUIDs.
    """
    names = [name for name in visible.split(",") if name] or [gpu["index"] for gpu in gpus]
    wanted = [int(device.partition(":")[2] or 0) for device in devices if device != "cpu"]
    chosen = [names[number] for number in wanted if number < len(names)]
    used = [
        gpu for gpu in gpus if any(gpu["index"] == name or gpu["uuid"].startswith(name) for name in chosen)
    ]
    return used or (gpus if wanted else [])


def machine_name(environment: dict[str, Any]) -> str:
    """The GPU, or the processor where there is none, in a few words."""
    gpus = environment.get("gpus")
    if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
        return str(gpus[0].get("name", "unknown GPU"))
    return f"{environment.get('cpu', 'unknown processor')} ({environment.get('cores', '?')} cores)"


def busy(environment: dict[str, Any]) -> str:
    """What else ran when a run began, in a few words; empty: next to nothing."""
    load, cores = environment.get("load_average", 0.0), environment.get("cores", 1)
    others = len(environment.get("gpu_processes", ()))
    told = [f"load {load:.1f} on {cores} cores"] * (load > 0.75 * cores)
    return ", ".join(told + [f"{others} processes on the GPU"] * (others > 0))


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _nvidia_smi(what: str, fields: str) -> list[dict[str, str]]:
    lines = _run("nvidia-smi", f"--query-{what}={fields}", "--format=csv,noheader").splitlines()
    return [dict(zip(fields.split(","), map(str.strip, line.split(",")), strict=False)) for line in lines]


def _run(*command: str) -> str:
    """Output of a command; empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
