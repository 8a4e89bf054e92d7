"""Which kind of work and which stage of a round a kernel belongs to.

The optimized program says it: what is fused into an instruction, and the named scopes it came
from. A kernel that no instruction is known for is judged by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bench.hlo import COPIES, Instruction, Program

CLASSES = (
    *("matmul", "attention", "elementwise", "norm", "sampling", "copies", "collectives", "gaps"),
)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
STAGES = ("dspark_propose", "target_verify", "decode_sample")
SEARCHED = 20  # instructions, for a stage
OTHER = "other"  # no stage: the loop itself and what it keeps of each round
CONTAINERS = ("while", "conditional", "call")

# In this order; the first that fits. Kernels of libraries and of this package carry such names.
NAMES = (
    ("collectives", r"nccl|all[-_]?(reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective"),
    ("copies", r"^mem(cpy|set)|copy|transpose"),
    ("attention", r"attention|attend|flash|fmha|cudnn|join_runs"),
    ("sampling", r"markov|walk_step|argmax|sort|top_?k|rng|threefry"),
    ("norm", r"norm|rsqrt|softmax"),
    ("matmul", r"gemm|matmul|(^|_)dot|nvjet|cutlass|cublas|xmma|splitk|gemv"),
)
LIBRARY_MATMUL = re.compile(r"gemm|matmul|cublas|onednn", re.IGNORECASE)
SAMPLING_SCOPES = ("decode_sample", "markov_walk")


class Kernels:
    """The instructions of a program, found by the names that a profile uses."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._by_name = {one.name: one for body in program.computations.values() for one in body}
        # A GPU's kernels are named like their instructions, with other marks.
        self._by_kernel = {_plain(name): one for name, one in self._by_name.items()}

    def find(self, name: str, hlo_op: str) -> Instruction | None:
        """The instruction of an event."""
        return self._by_name.get(hlo_op) or self._by_kernel.get(_plain(hlo_op or name))

    def class_of(self, name: str, one: Instruction | None) -> str:
        """One of CLASSES, but for the gaps."""
        if one is None or (one.opcode == "custom-call" and not one.op_name):
            return class_of_name(name)
        parts = self._program.contents(one)
        scopes = one.op_name.split("/")
        if one.opcode.startswith(COLLECTIVES):
            return "collectives"
        if self._program.root(one).opcode in COPIES or one.opcode.startswith("copy"):
            return "copies"
        if any("block_attention" in scope for scope in scopes):
            return "attention"
        if _multiplies(parts, scopes):
            return "matmul"
        if any(scope in SAMPLING_SCOPES for scope in scopes):
            return "sampling"
        if any(part.opcode == "rsqrt" for part in parts):
            return "norm"
        return "elementwise"

    def stage_of(self, one: Instruction | None) -> str:
        """One of STAGES, or OTHER. What carries no scope belongs where its operands come from."""
        seen: list[Instruction] = [] if one is None else [one]
        for part in seen:  # grows: breadth first
            for scope in _scopes(self._program.contents(part)):
                if scope in STAGES:
                    return scope
            if len(seen) < SEARCHED and part.opcode != "parameter":
                seen += [self._by_name[name] for name in part.operands if name in self._by_name]
        return OTHER


def class_of_name(name: str) -> str:
    """The class that a kernel's name tells."""
    for found, pattern in NAMES:
        if re.search(pattern, name, re.IGNORECASE):
            return found
    return "elementwise"


def _multiplies(parts: list[Instruction], scopes: list[str]) -> bool:
    """Whether a product of matrices is inside, is called, or is only summed here (split K)."""
    if any(part.opcode in ("dot", "convolution") for part in parts):
        return True
    whole = parts[0]
    if whole.opcode == "custom-call":
        return bool(LIBRARY_MATMUL.search(f"{whole.target} {whole.op_name}"))
    return scopes[-1] == "dot_general"


def _scopes(parts: list[Instruction]) -> Iterator[str]:
    for part in parts:
        yield from part.op_name.split("/")


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)
