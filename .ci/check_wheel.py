"""Fail unless a wheel holds both packages, and every kernel source of the working tree."""

import sys
import zipfile
from pathlib import Path


def main(wheel: str) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    root = Path(__file__).parents[1]
    sources = [path for package in ("grinf", "kernels_cupy") for path in (root / package).rglob("*")]
    expected = {str(path.relative_to(root)) for path in sources if path.suffix in (".py", ".cu", ".cuh")}
    if missing := sorted(expected - inside):
        sys.exit(f"{wheel} lacks {len(missing)} of {len(expected)} files: {', '.join(missing)}")
    kernels = sum(name.endswith((".cu", ".cuh")) for name in inside)
    if not kernels:
        sys.exit(f"{wheel} holds no kernel source")
    sys.stdout.write(f"wheel: {len(expected)} sources, {kernels} of them CUDA\n")


main(sys.argv[1])
