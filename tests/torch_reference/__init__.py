"""A compact PyTorch DSpark in float32, the yardstick of the parity tests.

The target is transformers' own causal language model; the draft and the loop are written here
from the paper (arXiv 2607.05147) and its published reference. It never sees the JAX code.
"""

import torch

from tests.torch_reference.decode import Round, Run, generate
from tests.torch_reference.draft import TorchDraft, load_draft
from tests.torch_reference.target import load_target, tapped_forward

__all__ = [
    "Round",
    "Run",
    "TorchDraft",
    "generate",
    "load_draft",
    "load_target",
    "tapped_forward",
]

torch.set_num_threads(1)  # the matrices are tiny: more threads only wait for each other
