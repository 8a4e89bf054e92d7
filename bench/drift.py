"""How often bfloat16 makes a greedy text of speculation differ from one of plain decoding.

Both follow the same argmax, but a step of eight rows rounds other sums than a step of one: where
the two likeliest tokens are as close as bfloat16 rounds, the texts part. The margin is the
difference of these two tokens' logits in plain decoding, at the first token that differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
from rich.console import Console

from bench.datasets import read_conversations
from bench.output import append_lines, check_out
from bench.pairs import (
    EMBEDDED_DRAFT,
    NONE,
    add_model_flags,
    brings_draft,
    load_drafts,
)
from bench.progress import progress_bar
from convert.flags import Parser, positive
from dspark_jax.engine import Engine
from dspark_jax.generate import tell
from dspark_jax.request import Result, SamplingParams
from pallas_kernels.platform import default_device

NAMES = (
    *("fibonacci", "quicksort", "is_prime", "reverse_string", "word_count"),
    *("flatten", "gcd", "binary_search", "matrix_multiply", "parse_csv"),
)
OPENINGS = (
    "def {}(n):\n",
    'def {}(items):\n    """Return the result."""\n',
    "def {}(a, b):\n    if ",
    "# {}\nimport ",
    "class {}:\n    def __init__(self",
    "def {}(text):\n    for ",
    "def test_{}():\n    assert ",
    "from {} import ",
    "async def {}(self, *args):\n    try:\n",
    "    def {}(self):\n        return ",
)
PROMPTS = tuple(opening.format(name) for opening in OPENINGS for name in NAMES)


def compare_texts(plain: Sequence[Result], drafted: Sequence[Result]) -> dict[str, Any]:
    """Texts that differ, where each first does, and the margin there; margins of all tokens."""
    places, margins, all_margins = [], [], []
    for alone, other in zip(plain, drafted, strict=True):
        assert alone.logprobs is not None
        all_margins += [margin(one) for one in alone.logprobs]
        pairs = enumerate(zip(alone.token_ids, other.token_ids, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), None)
        if first is not None:
            places.append(first)
            margins.append(margin(alone.logprobs[first]))
    return {
        "prompts": len(plain),
        "tokens": len(all_margins),
        "differing": len(places),
        "share": round(len(places) / len(plain), 4),
        "first_difference": places,
        "margins": [round(one, 5) for one in margins],
        "median_margin": round(median(margins), 5) if margins else None,
        "largest_margin": round(max(margins), 5) if margins else None,
        "median_margin_of_all": round(median(all_margins), 5),
    }


def margin(logprobs: Mapping[int, float]) -> float:
    """Logit of the likeliest token less that of the second."""
    first, second, *_ = sorted(logprobs.values(), reverse=True)
    return first - second


def generate(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[Result]:
    """Greedy texts, a batch at a time, with a progress bar."""
    results = []
    with progress_bar("plain" if engine.config.draft is None else "draft", len(prompts)) as advance:
        for begin in range(0, len(prompts), engine.max_batch):
            part = prompts[begin : begin + engine.max_batch]
            results += engine.generate(part, params)
            advance(len(part))
    return results


def build_parser() -> argparse.ArgumentParser:
    """The flags of `bench drift`."""
    parser = Parser(prog="bench drift", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    add = parser.add_argument
    add("--draft", metavar="DIR", help="folder, hub id or ngram (the embedded draft)")
    add("--dataset", metavar="PATH", help="prompts; each first turn is one (100 openings of code)")
    add("--num-prompts", type=positive, default=len(PROMPTS), metavar="N", help="at most (100)")
    add("--output-len", type=positive, default=256, metavar="N", help="tokens of each (256)")
    add("--max-concurrency", type=positive, default=10, metavar="C", help="in a batch (10)")
    add("--out", type=Path, metavar="FILE", help="append a JSON line here")
    parser.set_defaults(dtype="bfloat16")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; raises ValueError for what a caller can mend."""
    options = build_parser().parse_args(arguments)
    check_out(options.out)
    if not options.draft and not brings_draft(options):
        raise ValueError(f"{options.target} brings no draft; name one with --draft")
    prompts: Sequence[str] = PROMPTS
    if options.dataset:
        prompts = [one.turns[0] for one in read_conversations(options.dataset)]
    prompts = prompts[: options.num_prompts]
    names = [EMBEDDED_DRAFT if options.draft is None else options.draft, NONE]
    engines = load_drafts(options, names, min(options.max_concurrency, len(prompts)))
    params = SamplingParams(
        max_tokens=options.output_len, temperature=0.0, logprobs=2, ignore_eos=True
    )
    drafted, plain = (generate(engine, prompts, params) for engine in engines)
    line = {
        "bench": "drift",
        "name": names[0],
        **compare_texts(plain, drafted),
        "output_len": options.output_len,
        "dtype": options.dtype,
        "device": default_device().device_kind,
        "jax": jax.__version__,
    }
    append_lines([line], options.out)
    if options.out:
        tell(f"wrote {options.out}")
    Console().print(describe(line), highlight=False)
    return 0


def describe(line: Mapping[str, Any]) -> str:
    """The measurement in a sentence or two."""
    text = (
        f"{line['differing']} of {line['prompts']} greedy texts of {line['output_len']} tokens"
        f" ({100 * line['share']:.0f} %) differ between speculative and plain decoding in"
        f" {line['dtype']}"
    )
    if line["margins"]:
        text += (
            f"; where they part, the two likeliest tokens lie {line['median_margin']:.3f} apart in"
            f" the median and {line['largest_margin']:.3f} at most (median of all tokens:"
            f" {line['median_margin_of_all']:.3f})"
        )
    return text + "."
