"""Optimized HLO text as data: what a program launches, and what it copies.

An instruction that reads or makes no array of its own (a tuple, a bitcast) launches nothing; every
other one stands for a kernel, a library call or a memory copy on a GPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape"),
        *("after-all", "add-dependency", "opt-barrier", "domain", "partition-id", "replica-id"),
    )
)
COPIES = ("copy", "copy-start", "transpose")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*-> .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_LOOP_PARTS = re.compile(r"(body|condition)=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"[a-z]\w*\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """One line: `op_name` is the path of named scopes, `called` the computations it runs."""

    name: str
    opcode: str
    shape: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def op_name(self) -> str:
        found = _OP_NAME.search(self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """What a custom call calls."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""

    @property
    def called(self) -> list[str]:
        names = [re.findall(r"[\w.\-]+", group) for group in _CALLED.findall(self.rest)]
        return [name for group in names for name in group]

    @property
    def operands(self) -> list[str]:
        end, depth = 0, 1
        while depth:
            depth += (self.rest[end] in "([{") - (self.rest[end] in ")]}")
            end += 1
        return re.findall(r"%([\w.\-]+)", self.rest[: end - 1])

    @property
    def sizes(self) -> list[int]:
        """Elements of each array of the result."""
        return [
            math.prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(self.shape)
        ]


@dataclass(frozen=True)
class Program:
    """The computations of an optimized module, by name."""

    computations: dict[str, list[Instruction]]
    entry: str

    def reachable(self, name: str) -> Iterator[Instruction]:
        """The instructions that a computation runs, those of its loops and branches included.

        Fused computations and reducers are not entered: they are inside one kernel.
        """
        for one in self.computations.get(name, []):
            yield one
            if one.opcode in ("while", "conditional", "call"):
                for called in one.called:
                    yield from self.reachable(called)

    def contents(self, instruction: Instruction) -> list[Instruction]:
        """An instruction with everything that is fused into it."""
        found = [instruction]
        for called in instruction.called:
            for one in self.computations.get(called, []):
                found += self.contents(one)
        return found

    def root(self, instruction: Instruction) -> Instruction:
        """What a fusion computes last, behind bitcasts; another instruction is its own root."""
        if instruction.opcode != "fusion":
            return instruction
        body = self.computations[instruction.called[0]]
        by_name = {one.name: one for one in body}
        last = next(one for one in body if one.is_root)
        while last.opcode == "bitcast":
            last = by_name[last.operands[0]]
        return last

    def launches(self, name: str) -> int:
        """Kernels, library calls and copies that one run of a computation starts.

        A loop counts its trips where they are known, else one; a conditional its largest branch.
        """
        return sum(self._launched_by(one) for one in self.computations.get(name, []))

    def _launched_by(self, one: Instruction) -> int:
        if one.opcode == "while":
            trips = _TRIPS.search(one.rest)
            inside = sum(self.launches(called) for called in one.called)
            return inside * (int(trips[1]) if trips else 1)
        if one.opcode == "conditional":
            return 1 + max(self.launches(called) for called in one.called)
        if one.opcode == "call":
            return sum(self.launches(called) for called in one.called)
        if one.opcode in FREE or one.opcode.endswith("-done") or not any(one.sizes):
            return 0
        return 1

    def outer_loop(self) -> tuple[str, str]:
        """Body and condition of the loop that encloses all others.

        Raises ValueError where the program has no loop.
        """
        loops = [one for one in self.reachable(self.entry) if one.opcode == "while"]
        if not loops:
            raise ValueError("the program has no loop")
        outer = min(loops, key=lambda one: len(one.op_name) or math.inf)
        named = dict(_LOOP_PARTS.findall(outer.rest))
        return named["body"], named["condition"]

    def round_launches(self) -> int:
        """Launches of one round of the outer loop, its condition included."""
        return sum(self.launches(name) for name in self.outer_loop())

    def copied(self, sizes: Iterable[int]) -> list[str]:
        """Names of what copies an array of one of these sizes (elements) in the outer loop."""
        wanted = frozenset(sizes)
        return [
            one.name
            for one in self.reachable(self.outer_loop()[0])
            if self.root(one).opcode in COPIES and wanted.intersection(one.sizes)
        ]


def parse(text: str) -> Program:
    """Read `compiled.as_text()`. Raises ValueError for text without an entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif current is not None and (name := _NAME.match(line)):
            current.append(_instruction(name[2], bool(name[1]), line[name.end() :]))
        elif line.startswith("}"):
            current = None
    if not entry:
        raise ValueError("the text is not an optimized HLO module: it has no ENTRY")
    return Program(computations, entry)


def _instruction(name: str, is_root: bool, text: str) -> Instruction:
    """Split `shape opcode(operands), attributes`; a tuple's shape holds blanks and brackets."""
    end, depth = 0, 0
    while depth or text[end] != " ":
        depth += (text[end] in "([{") - (text[end] in ")]}")
        end += 1
    opcode = _OPCODE.match(text, end)
    if opcode is None:
        raise ValueError(f"cannot read the HLO instruction {name}: {text[:80]!r}")
    return Instruction(name, opcode[1], text[:end], text[opcode.end() :], is_root)
