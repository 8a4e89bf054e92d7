"""One of two processes that decode together. Run by test_sharding: PORT RANK STORE."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
import tensorstore
from jax.sharding import Mesh

from dspark_jax import SamplingParams, load
from tests.tiny import quick_compilation

PROMPTS = ["def f(x):\n", "import os\n", "class A"]
PARAMS = [
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=16, temperature=0.8, seed=4),
    SamplingParams(max_tokens=16, temperature=0.8),  # whatever seed the first process draws
]


def bytes_read() -> int:
    found: list[Any] = tensorstore.experimental_collect_matching_metrics(
        "/tensorstore/kvstore/file/bytes_read"
    )
    return sum(int(values["value"]) for metric in found for values in metric["values"])


def decode(
    store: str, mesh: Mesh | None = None, params: list[SamplingParams] = PARAMS
) -> dict[str, Any]:
    """Tokens, seeds, bytes read of the store, and the share of it that this process must hold."""
    before = bytes_read()
    engine = load(store, mesh=mesh, max_length=64, max_batch=4, dtype="float32", prefill_chunk=16)
    read, leaves = bytes_read() - before, jax.tree.leaves(engine.params)
    places = {
        (i, str(shard.index)): shard.data.nbytes
        for i, leaf in enumerate(leaves)
        for shard in leaf.addressable_shards
    }
    with quick_compilation():
        results = engine.generate(PROMPTS, params)
    return {
        "tokens": [result.token_ids for result in results],
        "seeds": [result.seed for result in results],
        "read": read,
        "share": sum(places.values()) / sum(leaf.nbytes for leaf in leaves),
    }


if __name__ == "__main__":
    port, rank, store = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(rank))
    # Heads are split between the processes, slots inside each.
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2).T, ("data", "tensor"))
    found = decode(store, mesh)
    try:
        load(store, mesh=Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor")))
    except ValueError as error:
        found["refused"] = str(error)
    print(json.dumps(found))
