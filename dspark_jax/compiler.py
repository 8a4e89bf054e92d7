"""What the library asks of XLA beyond its defaults; a flag in XLA_FLAGS wins."""

from __future__ import annotations

import os

# A whole call of rounds as one CUDA graph: its loop and the choice of a length too, which XLA's
# default leaves to the host (that costs a launch of its own a round).
OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    ),
}


def compiler_options() -> dict[str, str]:
    """Options for `lowered.compile(compiler_options=...)`; they mean nothing without a GPU."""
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in OPTIONS.items() if name not in given}
