"""The loader's text handling: what CuPy compiles is one text that holds every header."""

import re

import pytest
import torch

from kernels_cupy import STEMS, loader

HEADER = "// header\nint helper();\n"
SOURCE = '// kernel\n#include "common.cuh"\nint kernel();\n#include "other.cuh"\nint last();\n'


def test_headers_are_spliced_in_place_and_lines_keep_their_numbers() -> None:
    headers = {"common.cuh": HEADER, "other.cuh": "int other();\n"}
    text = loader.splice(SOURCE, "x.cu", headers.__getitem__)
    assert "#include" not in text
    assert numbered(text, "x.cu") == {1: "// kernel", 3: "int kernel();", 5: "int last();"}
    assert numbered(text, "common.cuh") == {1: "// header", 2: "int helper();"}
    assert numbered(text, "other.cuh") == {1: "int other();"}


def numbered(text: str, name: str) -> dict[int, str]:
    """What the compiler believes to be the lines of a file, without blank ones."""
    lines: dict[int, str] = {}
    current, number = "x.cu", 1
    for line in text.splitlines():
        if place := re.fullmatch(r'#line (\d+) "(.*)"', line):
            current, number = place[2], int(place[1])
            continue
        if current == name and line:
            lines[number] = line
        number += 1
    return lines


def test_a_text_without_headers_is_left_alone() -> None:
    text = 'int kernel();\n// #include "common.cuh" in a comment\n'
    assert loader.splice(text, "x.cu", {}.__getitem__) == text


def test_an_edited_header_changes_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    before = loader.source_text("merge_attention")
    read = loader.read
    monkeypatch.setattr(loader, "read", lambda name: read(name).replace("BF16 2", "BF16 3"))
    assert loader.source_text("merge_attention") != before


@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_is_one_text_that_includes_the_toolkit_alone(stem: str) -> None:
    included = re.findall(r"^#include (.*)$", loader.source_text(stem), re.MULTILINE)
    assert included
    assert all(name.startswith("<cuda") for name in included)


def test_options_name_constants_and_an_architecture() -> None:
    assert loader.options({"DTYPE": "BF16", "GROUP": 2}) == ("-std=c++17", "-DDTYPE=BF16", "-DGROUP=2")
    assert loader.options({}, "sm_90a")[-1] == "-arch=sm_90a"


def test_numbers_are_passed_in_their_c_types() -> None:
    assert loader.i32(7).nbytes == 4
    assert loader.f32(0.5).nbytes == 4
    assert loader.ptr(None) == 0
    assert loader.dtype_name(torch.float16) == "FP16"
    with pytest.raises(ValueError, match="float64"):
        loader.dtype_name(torch.float64)


def test_a_compile_error_names_the_kernel_and_carries_the_log() -> None:
    error = loader.KernelCompileError("path", "line 3: no such thing")
    assert error.stem == "path"
    assert "path.cu" in str(error)
    assert "line 3: no such thing" in str(error)
