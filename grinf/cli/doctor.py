"""`grinf doctor`: what this machine has, what it lacks, and what works here."""

import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grinf.cli.options import settings_command
from grinf.cli.render import CommandResult, Console, Table
from grinf.config.settings import DoctorSettings
from grinf.errors import ExitCode, GrinfError, KernelUnavailable, UsageError

if TYPE_CHECKING:
    from grinf.backend.registry import Site

MIN_FREE_BYTES = 2 << 30
TORCH_SUPPORTED = ((2, 11), (2, 15))
USUAL_MODEL = (128, 2, "bfloat16")
"""head_dim, query heads per key-value head, and dtype of Qwen3-0.6B; taken where no model is given."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""


@settings_command(DoctorSettings)
def command(settings: DoctorSettings, console: Console) -> CommandResult:
    """Check this machine, the model and the trie, and list the kernels that would run."""
    checks = [*_software(), *_gpus(settings), _disk(Path()), *_files(settings), *_kernels(settings)]
    failed = [check.name for check in checks if check.status == "fail"]
    rows = [[check.status, check.name, check.found, check.fix] for check in checks]
    messages = [f"failed: {', '.join(failed)}" if failed else "nothing here stops grinf"]
    if not any(check.name.startswith("gpu ") for check in checks):
        messages.append(
            "without a GPU every command runs on the CPU; `grinf bench` can simulate an engine (sim:)"
        )
    return CommandResult(
        "doctor",
        {"checks": [asdict(check) for check in checks]},
        [Table("", ["", "check", "found", "fix"], rows)],
        messages,
        ExitCode.ENVIRONMENT if failed else ExitCode.OK,
    )


def _software() -> Iterator[Check]:
    import torch

    yield Check("python", "ok", f"{platform.python_version()} at {sys.prefix}")
    low, high = (".".join(map(str, version)) for version in TORCH_SUPPORTED)
    is_supported = TORCH_SUPPORTED[0] <= _version(torch.__version__) < TORCH_SUPPORTED[1]
    fix = "" if is_supported else f"install torch >= {low}, < {high}"
    yield Check("torch", "warn" if fix else "ok", torch.__version__, fix)
    yield _cupy(torch.version.cuda)


def _cupy(torch_cuda: str | None) -> Check:
    """Compare the CUDA major version of CuPy with torch's: both load CUDA libraries into one process."""
    wheels = {name: _installed(f"cupy-{name}x") for name in ("cuda12", "cuda13")}
    name, version = next(((name, version) for name, version in wheels.items() if version), ("", ""))
    wanted = f"cuda{torch_cuda.partition('.')[0]}" if torch_cuda else ""
    if not torch_cuda:
        return Check("cupy", "ok", f"{version or 'absent'}; torch is a CPU build and does not use it")
    if not version:
        return Check("cupy", "warn", "absent", f"pip install 'grinf[{wanted}]' for the CUDA kernels")
    if name != wanted:
        fix = f"pip uninstall cupy-{name}x; pip install 'grinf[{wanted}]'"
        return Check("cupy", "fail", f"{version} for {name}, but torch is for {wanted}", fix)
    if _version(version)[0] < 14:
        return Check("cupy", "fail", version, f"pip install -U 'grinf[{wanted}]' (14 or newer)")
    return Check("cupy", "ok", f"{version} for {name}")


def _gpus(settings: DoctorSettings) -> Iterator[Check]:
    import torch

    asked = [device for device in settings.devices if device.startswith("cuda")]
    if not torch.cuda.is_available():
        missing = "the driver or the GPU" if torch.version.cuda else "a CUDA build of torch"
        found = f"none, where {', '.join(asked)} is asked for" if asked else "none"
        yield Check("gpu", "fail" if asked else "warn", found, f"needs {missing}; the CPU works without")
        return
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        found = f"{name}, capability {major}.{minor}, {free >> 20:,} of {total >> 20:,} MiB free"
        fix = "" if major >= 8 else "the kernels need capability 8.0"
        yield Check(f"gpu {index}", "warn" if fix else "ok", found, fix)


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    fix = "" if free >= MIN_FREE_BYTES else "free some: recall writes about 9 KB a query"
    return Check("disk", "warn" if fix else "ok", f"{free >> 20:,} MiB free in {folder.absolute()}", fix)


def _files(settings: DoctorSettings) -> Iterator[Check]:
    yield _file("model", "DIR", settings.model, _read_model)
    yield _file("trie", "FILE", settings.trie, _read_trie)


def _file(name: str, metavar: str, path: Path | None, read: Callable[[Path], str]) -> Check:
    if path is None:
        return Check(name, "ok", "none is set", f"--{name} {metavar} checks one")
    try:
        return Check(name, "ok", f"{path}: {read(path)}")
    except GrinfError as error:
        return _failed(name, error)


def _failed(name: str, error: GrinfError) -> Check:
    return Check(name, "fail", " ".join(filter(None, (error.what, error.why))), error.fix)


def _read_model(path: Path) -> str:
    from grinf.model.config import read_config
    from grinf.model.weights import check_files

    config = read_config(path)
    if path.is_dir():
        check_files(path)
    return (
        f"{config.kind}, {config.num_layers} layers of {config.hidden_size}, {config.vocab_rows:,} token rows"
    )


def _read_trie(path: Path) -> str:
    from grinf.trie import Trie

    trie = Trie.open(path)
    return f"{trie.num_nodes[-1]:,} SIDs of {trie.levels} levels, digest {trie.content_digest[:12]}"


def _kernels(settings: DoctorSettings) -> Iterator[Check]:
    """Choose an implementation of every op as the engine would on this machine; compiles nothing."""
    from grinf.backend.registry import OPS, default_registry

    registry, overrides, site = default_registry(), settings.engine_options()["kernels"], _site(settings)
    for op in overrides.keys() - OPS:
        yield Check(op, "fail", f"--kernels {op}={overrides[op]}: it is no op", f"one of {', '.join(OPS)}")
    for op in OPS:
        name = f"{op} ({site.device}, {site.dtype})"
        try:
            yield Check(name, "ok", registry.choose(op, site, overrides.get(op)).name)
        except (KernelUnavailable, UsageError) as error:
            yield _failed(name, error)


def _site(settings: DoctorSettings) -> "Site":
    """Say where the engine would run: on the first GPU if there is one, else on the CPU."""
    import torch

    from grinf.backend.registry import Site
    from grinf.model.config import read_config

    head_dim, group, dtype = USUAL_MODEL
    if settings.model is not None:
        with suppress(GrinfError):  # Told by the check of the model.
            config = read_config(settings.model)
            head_dim, group, dtype = config.head_dim, config.group, config.dtype
    asked = None if settings.dtype == "auto" else settings.dtype
    page_size = settings.page_size or 64
    if settings.devices[0] == "cpu" or not torch.cuda.is_available():
        return Site("cpu", None, asked or "float32", head_dim, group, page_size)
    major, minor = torch.cuda.get_device_capability()
    return Site("cuda", 10 * major + minor, asked or dtype, head_dim, group, page_size)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
