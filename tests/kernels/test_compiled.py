"""Every SPECS entry lowers for CUDA; with a CUDA compiler, it becomes machine code for an H200."""

from __future__ import annotations

import jax
import pytest

from tests.kernels.described import (
    can_describe,
    compile_with_report,
    copied_arrays,
    kernel_calls,
    needs_compiler,
    spilled_bytes,
)
from tests.kernels.shapes import cases

CASES = {case.name: case for case in cases()}


@pytest.mark.skipif(can_describe(), reason="compiled below, which lowers first")
@pytest.mark.parametrize("name", CASES)
def test_lowers_for_cuda(name):
    case = CASES[name]
    lowered = jax.jit(case.function).trace(*case.operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") >= case.calls


@needs_compiler
@pytest.mark.parametrize("name", CASES)
def test_compiles_for_an_h200(name, capfd):
    case = CASES[name]
    program, report = compile_with_report(capfd, case.function, *case.operands, donate=case.donated)
    assert kernel_calls(program) == case.calls
    assert spilled_bytes(report) == 0
    assert copied_arrays(program, case.kept) == 0
