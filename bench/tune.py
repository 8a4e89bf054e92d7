"""Search the sizes of each kernel on this device and write them as its tuned table."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from bench.kernel_cases import (
    Case,
    attention_case,
    context_case,
    matmul_case,
    qkv_case,
    walk_case,
)
from bench.kernels import OPS, operand_sets
from bench.timing import measure
from convert.flags import Parser
from pallas_kernels import block_attention, context_kv, fused_matmul, markov_walk, qkv_write
from pallas_kernels.platform import default_device, resolve_implementation
from pallas_kernels.tuning import device_file

Make = Callable[..., Case]  # (spec, "pallas", config=...)
TUNED = Path(block_attention.__file__).parent / "tuned"


def attention_configs(spec: block_attention.Spec) -> Iterator[block_attention.Config]:
    """One batch row: a fixed number of runs. More: slots for all runs together."""
    slots = (64, 128, 256) if spec.batch == 1 else (128, 256, 264)
    stages = (2, 4) if spec.batch * spec.kv_heads <= 64 else (2, 3)
    for depth, count in product(stages, slots):
        yield block_attention.Config(stages=depth, slots=count)
    yield block_attention.Config(block=128, stages=2, slots=slots[1])


def head_configs(spec: Any) -> Iterator[qkv_write.Config]:
    yield from (qkv_write.Config(n) for n in (2, 4, 8) if spec.kv_heads % n == 0)


def matmul_configs(spec: fused_matmul.Spec) -> Iterator[fused_matmul.Config]:
    """As many tiles in flight as shared memory holds, of each depth."""
    for depth in (128, 256):
        most = fused_matmul.most_stages(spec.rows, spec.width, depth)
        yield from (fused_matmul.Config(depth=depth, stages=n) for n in (most - 1, most) if n > 1)


def searches(op: str) -> Iterator[tuple[str, Any, Make, list[Any]]]:
    """Yield (shape name, spec, case maker, candidates) of every spec of an op."""
    if op == "block_attention":
        for spec in block_attention.SPECS:
            shape = (spec.batch, spec.rows, spec.heads, spec.head_dim)
            name = block_attention.shape_name(shape, spec.kv_heads)
            yield name, spec, attention_case, list(attention_configs(spec))
        return
    if op == "markov_walk":
        for walk_spec in markov_walk.SPECS:
            name = markov_walk.shape_name(walk_spec.batch, walk_spec.vocabulary, walk_spec.rank)
            depths = (2, 3, 4, 6) if walk_spec.batch <= 8 else (1, 2, 3)
            configs = [markov_walk.Config(stages=depth) for depth in depths]
            yield name, walk_spec, walk_case, configs
        return
    if op == "fused_matmul":
        for one in fused_matmul.SPECS:
            sizes = (one.rows, one.width, one.out, one.gated)
            yield fused_matmul.shape_name(*sizes), one, matmul_case, list(matmul_configs(one))
        return
    make: Make = qkv_case if op == "qkv_write" else context_case
    specs: tuple[Any, ...] = qkv_write.SPECS if op == "qkv_write" else context_kv.SPECS
    for head_spec in specs:
        name = qkv_write.shape_name(head_spec.batch * head_spec.rows, head_spec.kv_heads)
        yield name, head_spec, make, list(head_configs(head_spec))


def search(op: str, match: list[str] | None, repeats: int) -> dict[str, dict[str, Any]]:
    """Time every candidate on every spec; the lowest geometric mean wins its shape name."""
    times: dict[str, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, spec, make, configs in searches(op):
        if match and not any(text in name for text in match):
            continue
        sets = None
        for config in configs:
            case = make(spec, "pallas", config=config)
            if sets is None or case.in_place:  # donated sets do not serve twice
                sets = operand_sets(case)
            try:
                timing = measure(case.call, sets, in_place=case.in_place, repeats=repeats)
            except ValueError as error:  # more shared memory than there is
                print(f"{op} {name} {config}: {error}", flush=True)
                continue
            times[name][config].append(timing.time_us)
            print(f"{op} {name} {spec} {config}: {timing.time_us:.2f} us", flush=True)
    found = {}
    for name, by_config in times.items():
        most = max(len(runs) for runs in by_config.values())
        full = {c: math.prod(runs) for c, runs in by_config.items() if len(runs) == most}
        found[name] = asdict(min(full, key=lambda config: full[config]))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="bench tune", description=__doc__)
    parser.add_argument("--op", action="append", choices=OPS, help="only this op (repeatable)")
    parser.add_argument(
        "--match", action="append", help="only shapes whose name holds this text, as 'batch 1 '"
    )
    parser.add_argument("--repeats", type=int, default=20, help="calls of each candidate")
    parser.add_argument("--out", type=Path, help="the table; by default this device's own")
    options = parser.parse_args(arguments)
    resolve_implementation("pallas")
    path = options.out or TUNED / device_file(default_device())
    table = json.loads(path.read_text()) if path.is_file() else {}
    for op in options.op or OPS:
        table[op] = table.get(op, {}) | search(op, options.match, options.repeats)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
