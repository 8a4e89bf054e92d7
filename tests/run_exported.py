"""Generate from an exported pair in a process of its own. Run by test_export: DIR."""

from __future__ import annotations

import json
import sys

from dspark_jax import SamplingParams, load_exported

PROMPTS = [[5, 9, 2, 40], [7] * 20, [1, 2, 3], [8]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=3)
BATCHES = ([GREEDY] * 4, [GREEDY, DRAWN, DRAWN, GREEDY])

if __name__ == "__main__":
    pair = load_exported(sys.argv[1])
    results = [pair.generate(PROMPTS, params) for params in BATCHES]
    tokens = [[(one.token_ids, one.acceptance_lengths) for one in batch] for batch in results]
    print(json.dumps({"results": tokens, "modules": sorted(sys.modules)}))
