"""Prompts of several lengths in chunks of several sizes: tokens a second, time to first token.

Weights are random and of true shapes. The share of the peak is the multiplications that the prompt
asks for (matrices once a token, causal attention over half of its square) over those of a square
matrix product timed in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import hlo
from bench.kernel_classes import CLASSES, Kernels
from bench.models import SIZES, plain
from bench.output import append_lines, check_chart, check_out, save_chart
from bench.profile import summarize
from bench.step import Line, pair
from bench.timing import matmul_peak
from bench.trace import record_events
from convert.flags import Parser
from dspark_jax import decode
from dspark_jax.compiler import compiler_options
from dspark_jax.config import ModelConfig
from dspark_jax.generate import tell
from dspark_jax.request import SamplingParams
from dspark_jax.rows import prompt_chunks, row_settings
from dspark_jax.state import DecodeState, Params
from pallas_kernels.platform import default_device

REPEATS = 3
GPU_SQUARE, CPU_SQUARE = 8192, 512  # sides of the product that the peak is measured by


def prefill_flops(config: ModelConfig, params: Params, tokens: int) -> float:
    """Multiplications and additions that a prompt asks for; the head runs for its last row only."""
    trees = [params["target"]["layers"]]
    if config.draft_network:
        trees += [params["draft"]["fc"], params["draft"]["context_kv"]]
    weights = sum(x.size for x in jax.tree.leaves(trees) if x.ndim == 2)
    layers = config.target.layers
    attended = layers.num_layers * layers.num_heads * layers.head_dim * tokens * (tokens + 1) / 2
    return 2 * tokens * weights + 4 * attended


@dataclass
class Prefill:
    """A compiled prefill of one slot: run(state, ids) -> (state, first token on the host)."""

    config: ModelConfig
    params: Params
    compiled: Any

    def run(self, state: DecodeState, ids: np.ndarray) -> tuple[DecodeState, int]:
        """Admit a prompt and run its chunks, as an engine does."""
        slot = np.int32(0)
        row = row_settings(len(ids), SamplingParams(max_tokens=1), seed=0, stop_ids=[])
        state = decode.admit(self.config, state, slot, row)
        for chunk in prompt_chunks(ids.tolist(), self.config.decode.prefill_chunk):
            state, first = self.compiled(self.params, state, slot, *chunk)
        return state, int(first.token)


def compile_prefill(config: ModelConfig, params: Params) -> Prefill:
    """Compile the prefill of one slot."""
    state = jax.eval_shape(partial(decode.init_state, config, 1))
    chunk = np.zeros(config.decode.prefill_chunk, np.int32)
    inputs = (np.int32(0), chunk, np.int32(0), np.bool_(False))
    lowered = decode.prefill.lower(config, params, state, *inputs)
    return Prefill(config, params, lowered.compile(compiler_options()))


def measure(prefill: Prefill, lengths: Sequence[int], peak: float, profile: bool) -> list[Line]:
    """A record for each length of prompt, the shortest first: the peak of memory only grows."""
    lines = []
    state = decode.init_state(prefill.config, 1)
    rng = np.random.default_rng(0)
    for tokens in sorted(lengths):
        ids = rng.integers(prefill.config.target.vocab_size, size=tokens).astype(np.int32)
        seconds = []
        for _ in range(REPEATS + 1):
            jax.block_until_ready(state)
            begin = time.perf_counter()
            state, _ = prefill.run(state, ids)
            seconds.append(time.perf_counter() - begin)
        taken = median(seconds[1:])  # the first warms up
        flops = prefill_flops(prefill.config, prefill.params, tokens)
        stats = default_device().memory_stats() or {}
        line = {
            "seconds": round(taken, 6),
            "spread": [round(min(seconds[1:]), 6), round(max(seconds[1:]), 6)],
            "tokens_per_second": round(tokens / taken, 1),
            "flops": flops,
            "share_of_peak": round(flops / taken / peak, 4),
            "matmul_peak": round(peak),
            "peak_bytes": stats.get("peak_bytes_in_use"),
            "temp_bytes": prefill.compiled.memory_analysis().temp_size_in_bytes,
        }
        if profile:
            line["profile"], state = _trace(prefill, state, ids)
        tell(
            f"chunk {prefill.config.decode.prefill_chunk}, {tokens} tokens: {taken:.4f} s,"
            f" {line['tokens_per_second']:.0f} tokens/s, {100 * line['share_of_peak']:.1f} % of the"
            " matmul peak"
        )
        lines.append({"tokens": tokens, **line})
    return lines


def _trace(
    prefill: Prefill, state: DecodeState, ids: np.ndarray
) -> tuple[dict[str, Any], DecodeState]:
    """Microseconds of one prompt by kind of kernel."""
    kept = []
    events = record_events(lambda: kept.append(prefill.run(state, ids)[0]))
    kernels = Kernels(hlo.parse(prefill.compiled.as_text()))
    found = summarize(events, kernels, 1)
    return {key: found[key] for key in ("time_us", "classes", "longest")}, kept[0]


def show(lines: Sequence[Line]) -> None:
    """Print a table, and where they were traced the shares by kind of kernel."""
    console = Console()
    names = ("chunk", "tokens", "time to first token", "tokens/s", "% of matmul peak", "peak GB")
    table = Table(*names)
    for line in lines:
        shape = line["shape"]
        table.add_row(
            str(shape["chunk"]),
            str(shape["tokens"]),
            f"{1e3 * line['seconds']:.1f} ms",
            f"{line['tokens_per_second']:.0f}",
            f"{100 * line['share_of_peak']:.1f}",
            "-" if line["peak_bytes"] is None else f"{line['peak_bytes'] / 1e9:.1f}",
        )
    console.print(table)
    for line in lines:
        if "profile" in line:
            classes = line["profile"]["classes"]
            total = sum(classes.values())
            shares = ", ".join(f"{name} {100 * classes[name] / total:.1f} %" for name in CLASSES)
            shape = line["shape"]
            console.print(f"chunk {shape['chunk']}, {shape['tokens']} tokens: {shares}")


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench prefill`."""
    parser = Parser(prog="bench prefill", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="embedded", choices=("embedded", *SIZES))
    add("--tokens", type=int, nargs="+", default=[256], metavar="N", help="of a prompt (256)")
    add("--chunk", type=int, nargs="+", default=[64], metavar="ROWS", help="of one call (64)")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--implementation", nargs="+", default=["auto"], choices=("auto", "xla"))
    add("--no-draft", action="store_true", help="the target alone")
    add("--profile", action="store_true", help="also device time by kind of kernel")
    add("--out", type=Path, metavar="FILE", help="append JSON Lines here")
    add("--chart", type=Path, metavar="FILE", help="tokens/s by length, .svg or .png")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    if min(*options.tokens, *options.chunk) < 1:
        raise ValueError("--tokens and --chunk must be positive")
    check_chart(options.chart)
    check_out(options.out)
    length = max(options.tokens) + 1
    config, params = pair(options.model, options.dtype, max_length=length)
    if options.no_draft:
        config, params = plain(config), {"target": params["target"]}
    side = GPU_SQUARE if default_device().platform == "gpu" else CPU_SQUARE
    peak = matmul_peak(side, config.dtype)
    tell(f"{default_device().device_kind}: {peak / 1e12:.2f} TFLOP/s in a product of side {side}")
    lines = []
    for wanted in options.implementation:
        for chunk in options.chunk:
            switches = {"implementation": wanted, "max_length": length, "prefill_chunk": chunk}
            own = replace(config, decode=replace(config.decode, **switches))
            begin = time.perf_counter()
            prefill = compile_prefill(own, params)
            compile_s = round(time.perf_counter() - begin, 1)
            tell(f"chunk {chunk}: compiled in {compile_s} s")
            for found in measure(prefill, options.tokens, peak, options.profile):
                shape = {"model": options.model, "chunk": chunk, "tokens": found.pop("tokens")}
                lines.append(
                    {
                        "bench": "prefill",
                        "name": "prefill" if own.draft else "prefill_plain",
                        "implementation": wanted,
                        "shape": shape,
                        **found,
                        "compile_s": compile_s,
                        "dtype": own.dtype,
                        "device": default_device().device_kind,
                        "jax": jax.__version__,
                    }
                )
                append_lines(lines[-1:], options.out)
    show(lines)
    save_chart("prefill_chart", lines, options.chart)
    return 0
