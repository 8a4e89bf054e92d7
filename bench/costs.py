"""Measure what rounds cost here, for verification that is scheduled by it, and keep it.

`load(verification="scheduled")` and `--verification scheduled` find the file, for this pair on this
device.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from bench.pairs import EMBEDDED_DRAFT, add_model_flags, load_drafts
from convert.flags import Parser, positive
from dspark_jax.costs import MAX_BATCH
from dspark_jax.generate import tell
from dspark_jax.tiers import BatchCosts


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench costs`."""
    parser = Parser(prog="bench costs", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--draft", default=EMBEDDED_DRAFT, metavar="DIR", help="folder or hub id (embedded)")
    add("--num-speculative-tokens", type=positive, metavar="N", help="drafts a round")
    add("--max-batch", type=positive, default=MAX_BATCH, metavar="N", help="rows, at most (8)")
    add("--tensor-parallel", type=positive, default=1, metavar="N", help="devices (1)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    (engine,) = load_drafts(
        options,
        [options.draft],
        options.max_batch,
        num_speculative_tokens=options.num_speculative_tokens,
        tensor_parallel=options.tensor_parallel,
    )
    found: list[BatchCosts] = []

    def note(costs: BatchCosts) -> None:
        kind = "sampled" if costs.sampled else "greedy"
        tell(f"batch {costs.batch}, {kind}: plain {costs.plain:.0f} us")
        found.append(costs)

    path = engine.profile_costs(note)
    show(found)
    tell(f"kept in {path}")
    return 0


def show(found: Sequence[BatchCosts]) -> None:
    """One row a batch and kind."""
    table = Table("batch", "rounds", "plain, us", "drafted, us, by verified tokens")
    for costs in found:
        tiers = zip(costs.tokens, costs.rounds, strict=True)
        table.add_row(
            str(costs.batch),
            "sampled" if costs.sampled else "greedy",
            f"{costs.plain:.0f}",
            ", ".join(f"{tokens}: {cost:.0f}" for tokens, cost in tiers),
        )
    Console().print(table)
