"""Read, splice, compile, cache and launch the kernels of this package.

CuPy compiles and launches; torch owns every byte of device memory. CuPy is imported on first use, so that a
machine without it can import the bindings and test their grid arithmetic.
"""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

Define = str | int
INCLUDE: Final = re.compile(r'#include "(\w+\.cuh)"')
ARCHES: Final = ("sm_80", "sm_89", "sm_90a", "sm_100")
DTYPE_NAMES: Final = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class KernelCompileError(Exception):
    """A kernel file does not compile; carries the compiler's own words.

    Attributes:
        stem: Kernel file without its suffix.
        log: What the compiler said.
    """

    def __init__(self, stem: str, log: str) -> None:
        """Keep the parts; the message is both."""
        super().__init__(f"kernel {stem}.cu does not compile:\n{log}")
        self.stem = stem
        self.log = log


@dataclass(frozen=True, slots=True)
class Needs:
    """What a kernel asks of the device and of the model.

    Attributes:
        sm_min, sm_max: Compute capability as major * 10 + minor, inclusive; no upper bound if None.
        dtypes: Compute dtypes, by torch name.
        head_dims, groups: head_dim, and query heads per key-value head; None: any.
    """

    sm_min: int
    sm_max: int | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_dims: tuple[int, ...] | None = None
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Instance:
    """One compiled form of a kernel file: what the compile test and `make kernels` build.

    Attributes:
        stem: Kernel file without its suffix.
        entry: Name of the `extern "C"` kernel.
        defines: -D constants, (name, value) pairs.
        arches: Architectures that can build it.
        default: Part of the fast compile test; the rest only of the full matrix.
    """

    stem: str
    entry: str
    defines: tuple[tuple[str, Define], ...]
    arches: tuple[str, ...] = ARCHES
    default: bool = False


@dataclass(frozen=True, slots=True)
class Launcher:
    """A compiled kernel and its dynamic shared memory, ready to launch on torch's current stream."""

    function: Any
    smem_bytes: int

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Launch; pointers in `args` are ints (`ptr`), numbers are numpy scalars (`i32`, `f32`).

        The stream is looked up at every launch: a remembered one would put the kernel outside a graph
        capture.
        """
        self.function(grid, block, args, shared_mem=self.smem_bytes, stream=_torch_stream())


def kernel(
    stem: str, entry: str, defines: Mapping[str, Define], smem_bytes: int = 0, arch: str | None = None
) -> Launcher:
    """Return the kernel `entry` of `stem`.cu on torch's current device, compiled at most once per process.

    Args:
        stem: Kernel file without its suffix.
        entry: Name of the `extern "C"` kernel.
        defines: -D constants.
        smem_bytes: Dynamic shared memory per block.
        arch: An architecture-specific target ("sm_90a") for kernels that use its own instructions; None: the
            device's.

    Raises:
        KernelCompileError: The compiler refuses the file.
    """
    return _kernel(stem, entry, tuple(defines.items()), smem_bytes, arch, torch.cuda.current_device())


def source_text(stem: str) -> str:
    """Return `stem`.cu with the headers of this package spliced in place of their includes.

    CuPy's disk cache is keyed by the text it is handed, not by the files that the text includes: an edited
    header behind an #include would silently run the old binary.
    """
    return splice(read(f"{stem}.cu"), f"{stem}.cu", read)


def splice(text: str, name: str, read_header: Callable[[str], str]) -> str:
    """Replace each `#include "header"` line of the file `name`; #line keeps the compiler's messages true."""
    pieces: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        header = INCLUDE.fullmatch(line)
        if header:
            pieces += [f'#line 1 "{header[1]}"', read_header(header[1]), f'#line {number + 1} "{name}"']
        else:
            pieces.append(line)
    return "\n".join(pieces) + "\n"


def read(name: str) -> str:
    """Return the text of a file of this package."""
    return resources.files("kernels_cupy").joinpath(name).read_text(encoding="utf-8")


def options(defines: Mapping[str, Define], arch: str | None = None) -> tuple[str, ...]:
    """Return compiler options; CuPy adds the device's -arch, and NVRTC builds the more specific of two."""
    target = () if arch is None else (f"-arch={arch}",)
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in defines.items()), *target)


def ptr(tensor: Tensor | None) -> int:
    """Return a tensor's address, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def i32(value: int) -> np.int32:
    """Return an `int` argument; a plain python int would be passed as 64 bits."""
    return np.int32(value)


def f32(value: float) -> np.float32:
    """Return a `float` argument; a plain python float would be passed as a double."""
    return np.float32(value)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the value of -DDTYPE for a compute dtype.

    Raises:
        ValueError: No kernel computes in this dtype.
    """
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype {dtype} has no kernels; use one of {', '.join(map(str, DTYPE_NAMES))}")
    return DTYPE_NAMES[dtype]


def ceil_div(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


@functools.cache
def multiprocessors(device: int) -> int:
    """Return how many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_per_multiprocessor(device: int) -> int:
    """Return how many bytes of shared memory a multiprocessor of a CUDA device has."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


@functools.cache
def _kernel(
    stem: str,
    entry: str,
    defines: tuple[tuple[str, Define], ...],
    smem_bytes: int,
    arch: str | None,
    device: int,
) -> Launcher:
    import cupy

    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=source_text(stem), options=options(dict(defines), arch), backend="nvrtc")
        try:
            function = module.get_function(entry)
            # CuPy hands out one function for equal text and options: never take back what another form needs.
            function.max_dynamic_shared_size_bytes = max(function.max_dynamic_shared_size_bytes, smem_bytes)
        except cupy.cuda.compiler.CompileException as error:
            raise KernelCompileError(stem, str(error)) from error
    return Launcher(function, smem_bytes)


class _TorchStream:
    """Torch's current stream under the CUDA stream protocol, which older torch streams do not speak."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, torch.cuda.current_stream().cuda_stream


def _torch_stream() -> Any:
    import cupy

    return cupy.cuda.Stream.from_external(_TorchStream())


def cuda_major() -> int:
    """Return the major version of the CUDA runtime that CuPy was built for.

    Raises:
        ImportError: CuPy is not installed, or does not load.
    """
    import cupy

    return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
