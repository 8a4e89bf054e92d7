"""Each step of a round repeated inside one jit, so that neither host nor launch of a call counts.

What a step makes goes into the next one: XLA can neither lift work out of the loop nor drop it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bench import hlo
from bench.models import plain
from dspark_jax import decode
from dspark_jax.compiler import compiler_options
from dspark_jax.config import ModelConfig
from dspark_jax.costs import rewind
from dspark_jax.rounds import propose, verify_proposal
from dspark_jax.sharding import abstract_state, settle, use_mesh
from dspark_jax.state import MAX_ROUNDS, DecodeState, Params, Proposal

# Median over chains of calls of MAX_ROUNDS steps each: as long as an answer, so that how long the
# host takes to send the first call does not count.
REPEATS, CALLS = 3, 8
IDLE_CALLS = IDLE_ROUNDS = 4  # together the rounds of one call
entry: Callable[..., Any] = partial(jax.jit, static_argnums=0, donate_argnames=("state",))


@entry
def draft_steps(
    config: ModelConfig, params: Params, state: DecodeState, times: Int[Array, ""]
) -> tuple[DecodeState, Array]:
    """Repeat the draft step over the same rows; a proposal makes the next anchor and context.

    The laws that verification would read are written as they are in a round.
    """

    def step(_: Array, carry: tuple[DecodeState, Array]) -> tuple[DecodeState, Array]:
        state, proposal = propose(config, params, carry[0])
        anchor = (proposal.tokens.sum(axis=1) + proposal.length) % config.target.vocab_size
        context = state.context
        if context.features.shape[-1]:  # else the context rows would be computed once for all
            drawn = (anchor % 2).astype(context.features.dtype)
            context = replace(context, features=context.features.at[:, 0, 0].set(drawn))
        again = replace(state, anchor=anchor, context=context, context_len=carry[0].context_len)
        return again, proposal.probs

    laws = jnp.zeros_like(_proposal(config, params, state).probs)
    state, laws = jax.lax.fori_loop(0, times, step, (state, laws))
    return settle(state), laws


@entry
def verify_steps(
    config: ModelConfig, params: Params, state: DecodeState, times: Int[Array, ""]
) -> tuple[DecodeState, Array]:
    """Repeat the verify step on one proposal; each commits, and the next goes on from there."""
    proposal = _proposal(config, params, state)

    def step(_: Array, state: DecodeState) -> DecodeState:
        return verify_proposal(config, params, state, proposal)[0]

    state = jax.lax.fori_loop(0, times, step, state)
    return settle(state), settle(state.anchor)


def _proposal(config: ModelConfig, params: Params, state: DecodeState) -> Proposal:
    """A whole block of the tokens after the anchor, with random laws where laws are read."""
    shapes = jax.eval_shape(partial(decode.draft_step.__wrapped__, config), params, state)[1]
    key = jax.random.key(state.anchor[0])
    batch, drafts = shapes.tokens.shape
    return Proposal(
        tokens=(state.anchor[:, None] + 1 + jnp.arange(drafts)) % config.target.vocab_size,
        length=jnp.full((batch,), drafts, jnp.int32),
        probs=jax.nn.softmax(jax.random.normal(key, shapes.probs.shape)),
        confidence=jnp.zeros(shapes.confidence.shape, jnp.float32),
    )


ENTRIES: dict[str, Any] = {
    "plain_decode": decode.decode_rounds,
    "draft_step": draft_steps,
    "verify_step": verify_steps,
    "round": decode.decode_rounds,
}


@dataclass
class Loop:
    """A step compiled inside its loop: run(state, times) -> (state, what it emitted)."""

    name: str
    config: ModelConfig
    run: Callable[[DecodeState, Any], tuple[DecodeState, Any]]
    program: hlo.Program
    mesh: Mesh | None = None


def compile_loops(
    config: ModelConfig,
    params: Params,
    batch: int,
    names: Iterable[str] = ENTRIES,
    mesh: Mesh | None = None,
) -> list[Loop]:
    """Trace the named steps one after the other, then compile them side by side."""
    lowered = []
    for name in names:
        own = plain(config) if name == "plain_decode" else config
        weights = params if own.draft else {"target": params["target"]}
        state = abstract_state(partial(decode.init_state, own, batch), mesh)
        with use_mesh(mesh):
            loop = ENTRIES[name].lower(own, weights, state, np.int32(1))
        lowered.append((name, own, weights, loop))
    options = compiler_options()
    with ThreadPoolExecutor(len(lowered)) as pool:  # XLA compiles outside the interpreter's lock
        compiled = list(pool.map(lambda one: one[-1].compile(options), lowered))
    return [
        Loop(name, own, partial(program, weights), hlo.parse(program.as_text()), mesh)
        for (name, own, weights, _), program in zip(lowered, compiled, strict=True)
    ]


def wall(
    loop: Loop, state: DecodeState, cached: int, calls: int, rounds: int, *, read: bool = False
) -> tuple[float, DecodeState]:
    """Median seconds of `calls` chained calls of `rounds` steps, from the same rows each time.

    With `read` the host reads what each call emitted before it makes the next.
    """
    times = []
    count = np.int32(rounds)
    for repetition in range(REPEATS + 1):  # the first warms up
        state = rewind(state, cached)
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(calls):
            state, out = loop.run(state, count)
            if read:
                jax.device_get(out)
        jax.block_until_ready(state.cached)
        if repetition:
            times.append(time.perf_counter() - begin)
    return median(times), state


def time_step(loop: Loop, state: DecodeState, cached: int) -> tuple[float, DecodeState]:
    """Microseconds of one step."""
    seconds, state = wall(loop, state, cached, CALLS, MAX_ROUNDS)
    return seconds / (CALLS * MAX_ROUNDS) * 1e6, state


def idle_shares(
    loop: Loop, state: DecodeState, cached: int
) -> tuple[dict[str, float], DecodeState]:
    """1 - (one call of N x K rounds) / (N calls of K): what calls cost beside their rounds.

    `ahead`: the next call is made before the last one's result is read; `read`: after.
    """
    once, state = wall(loop, state, cached, 1, IDLE_CALLS * IDLE_ROUNDS)
    shares = {}
    for name, read in (("ahead", False), ("read", True)):
        parts, state = wall(loop, state, cached, IDLE_CALLS, IDLE_ROUNDS, read=read)
        shares[name] = round(1 - once / parts, 4)
    return shares, state


def matrix_sizes(trees: Sequence[Any], least: int = 4096) -> set[int]:
    """Elements on a device of arrays of two and more axes, the large ones: weights, caches."""
    leaves = [x for x in jax.tree.leaves(trees) if x.ndim > 1]
    sizes = {math.prod(x.sharding.shard_shape(x.shape)) for x in leaves}
    return {size for size in sizes if size >= least}


def inspect(loop: Loop, params: Params, state: DecodeState) -> dict[str, Any]:
    """What the optimized program tells of a round: launches, and copies of caches or weights."""
    large = matrix_sizes([params, state.target, state.draft])
    return {
        "launches": loop.program.round_launches(),
        "copies": len(loop.program.copied(large)),
    }
