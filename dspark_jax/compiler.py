"""What the library asks of XLA beyond its defaults; a flag in XLA_FLAGS wins."""

from __future__ import annotations

import os

import jax

# A whole call of rounds as one CUDA graph. XLA's default leaves out the loop, the choice of a
# length and collectives, each of which then costs launches of its own: on an H200 0.1 ms of 5.7
# a round, and 0.15 ms of 5.3 on two.
GRAPHS = (
    *("FUSION", "CUBLAS", "CUBLASLT", "CUSTOM_CALL", "CUDNN", "DYNAMIC_SLICE_FUSION"),
    *("WHILE", "CONDITIONAL", "COLLECTIVES"),
)
OPTIONS = {"xla_gpu_enable_command_buffer": ",".join(GRAPHS)}
RUN_SINCE = (0, 11)  # loops inside graphs have not been run with an earlier jax


def compiler_options() -> dict[str, str]:
    """Options for `lowered.compile(compiler_options=...)`; they mean nothing without a GPU."""
    if jax.__version_info__ < RUN_SINCE:
        return {}
    given = os.environ.get("XLA_FLAGS", "")
    return {name: value for name, value in OPTIONS.items() if name not in given}
