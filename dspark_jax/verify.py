"""Accepted prefix, residual draw, bonus: target logits and a proposal -> what the round emits.

Everything random comes in as an argument or through `sampling`'s keys; the acceptance
probabilities and the residual laws are pure functions, so that the emitted law can be enumerated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.config import DecodeConfig
from dspark_jax.controls import adjust_block
from dspark_jax.sampling import (
    Stream,
    coins,
    draw,
    gumbel_noise,
    largest,
    report_logprobs,
    stream_keys,
    token_law,
)
from dspark_jax.sharding import gather_logits
from dspark_jax.state import DecodeState, Proposal, StepOutput
from pallas_kernels.platform import unroll_scans

LEAST_MASS = 1e-8  # a residual lighter than this is rounding: draw from the target's law


def verify(
    logits: Float[Array, "B T V"], proposal: Proposal, state: DecodeState, decode: DecodeConfig
) -> StepOutput:
    """Judge a proposal by the target's logits of the anchor and the drafts.

    Emits the accepted drafts and one token of the target's own; a stop token inside the accepted
    prefix ends the row there (DeepSpec's evaluator: no bonus, and drafts after it count as not
    proposed).
    """
    if decode.sampled or decode.controls or decode.logprobs:  # else the largest of each part do
        logits = gather_logits(logits)
    adjusted = logits
    if decode.controls:
        adjusted = adjust_block(
            logits, proposal.tokens, state.controls, state.cached, state.stop_ids
        )
    possible = jnp.zeros((logits.shape[0], 0), jnp.float32)
    if not decode.sampled:
        accepted, last = verify_greedy(adjusted, proposal)
    else:
        laws = token_law(adjusted, state.sampling)
        if decode.rejection == "gumbel":
            accepted, last = verify_gumbel(laws, proposal, state)
        else:
            accepted, last = verify_rejection(laws, proposal, state, decode.rejection)
        if decode.ceiling:
            possible = jnp.sum(jnp.minimum(laws[:, :-1], proposal.probs), axis=-1)
    tokens, counts = emit(proposal, accepted, last, state)
    return StepOutput(
        tokens=tokens,
        counts=counts,
        logprobs=report_logprobs(logits, tokens, decode.logprobs),
        possible=possible,
    )


def verify_greedy(
    logits: Float[Array, "B T V"], proposal: Proposal
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Accept while the draft is the target's argmax; no law is built."""
    best = largest(logits)
    accepted = accepted_prefix(proposal.tokens == best[:, :-1], proposal.length)
    return accepted, _at(best, accepted)


def verify_gumbel(
    laws: Float[Array, "B T V"], proposal: Proposal, state: DecodeState
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Accept while the draft agrees with the target's own draw of the same noise."""

    def draw_slot(carry: None, slot: Array) -> tuple[None, Array]:
        keys = stream_keys(state.sampling, Stream.TARGET, state.cached + 1 + slot)
        return carry, draw(laws[:, slot], gumbel_noise(keys, laws.shape[-1]))

    slots = jnp.arange(laws.shape[1])
    # A slot at a time bounds the noise.
    _, drawn = jax.lax.scan(draw_slot, None, slots, unroll=unroll_scans())
    own = drawn.T.astype(jnp.int32)
    accepted = accepted_prefix(proposal.tokens == own[:, :-1], proposal.length)
    return accepted, _at(own, accepted)


def verify_rejection(
    laws: Float[Array, "B T V"], proposal: Proposal, state: DecodeState, rejection: str
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Speculative sampling with fresh coins, token by token or as a block."""
    flips = coins(state.sampling, state.cached, proposal.tokens.shape[1])
    accepted, residual = judge(laws, proposal, flips, rejection)
    keys = stream_keys(state.sampling, Stream.TARGET, state.cached + 1 + accepted)
    last = draw(residual, gumbel_noise(keys, laws.shape[-1]))
    return accepted, last.astype(jnp.int32)


def judge(
    laws: Float[Array, "B T V"],
    proposal: Proposal,
    flips: Float[Array, "B P"],
    rejection: str,
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """Accepted drafts and the law that the token after them is drawn from.

    Slot k is accepted where flips[:, k] < threshold[:, k]: up to the first failure (token), or up
    to the last success (block)."""
    if rejection == "block":
        chain = chain_products(laws, proposal)
        threshold = block_thresholds(laws, proposal, chain)
        passed = (flips < threshold) & _proposed(proposal)
        slots = jnp.arange(1, passed.shape[1] + 1)
        accepted = jnp.max(jnp.where(passed, slots, 0), axis=1, initial=0)
        weight = _at(chain, accepted)
    else:
        accepted = accepted_prefix(flips < token_thresholds(laws, proposal), proposal.length)
        weight = jnp.ones(accepted.shape, jnp.float32)
    return accepted, residual_law(laws, proposal, accepted, weight)


def accepted_prefix(agrees: Bool[Array, "B P"], length: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many leading slots agree, among the first `length`."""
    slots = jnp.arange(agrees.shape[1])
    kept = jnp.cumprod(agrees & (slots < length[:, None]), axis=1)
    return jnp.sum(kept, axis=1, dtype=jnp.int32)


def token_thresholds(laws: Float[Array, "B T V"], proposal: Proposal) -> Float[Array, "B P"]:
    """min(1, target / draft) of each drafted token."""
    target, draft = _drafted(laws, proposal)
    return jnp.where(draft > 0, jnp.minimum(1.0, target / jnp.where(draft > 0, draft, 1.0)), 0.0)


def chain_products(laws: Float[Array, "B T V"], proposal: Proposal) -> Float[Array, "B T"]:
    """p_0..p_P of block verification: p_i = min(p_{i-1} * target / draft, 1), p_0 = 1."""
    target, draft = _drafted(laws, proposal)
    ratio = jnp.where(draft > 0, target / jnp.where(draft > 0, draft, 1.0), 0.0)

    def step(product: Array, factor: Array) -> tuple[Array, Array]:
        product = jnp.minimum(product * factor, 1.0)
        return product, product

    first = jnp.ones(ratio.shape[:1], jnp.float32)
    _, rest = jax.lax.scan(step, first, ratio.T, unroll=unroll_scans())
    return jnp.concatenate([first[:, None], rest.T], axis=1)


def block_thresholds(
    laws: Float[Array, "B T V"], proposal: Proposal, chain: Float[Array, "B T"]
) -> Float[Array, "B P"]:
    """h_1..h_P (block verification, Sun et al. 2024): the chance that the cut falls at i or later.

    At the last proposed slot nothing follows, and h is the chain product itself."""
    products = chain[:, 1:]
    following = products[:, :-1, None] * laws[:, 1:-1] - proposal.probs[:, 1:]
    mass = jnp.sum(jnp.maximum(following, 0.0), axis=-1)
    mass = jnp.pad(mass, ((0, 0), (0, products.shape[1] - mass.shape[1])))
    whole = mass + 1.0 - products
    inner = jnp.where(whole > 0, mass / jnp.where(whole > 0, whole, 1.0), 1.0)
    last = jnp.arange(1, products.shape[1] + 1) == proposal.length[:, None]
    return jnp.where(last, products, inner)


def residual_law(
    laws: Float[Array, "B T V"],
    proposal: Proposal,
    accepted: Int[Array, " B"],
    weight: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """What is left of the target's law after the draft's share: max(weight * target - draft, 0),
    normalised; the target's law itself when every proposed draft was accepted."""
    target = _at(laws, accepted)
    if proposal.tokens.shape[1] == 0:
        return target
    slot = jnp.minimum(accepted, proposal.tokens.shape[1] - 1)
    rejected = accepted < proposal.length
    draft = jnp.where(rejected[:, None], _at(proposal.probs, slot), 0.0)
    left = jnp.maximum(weight[:, None] * target - draft, 0.0)
    mass = jnp.sum(left, axis=-1, keepdims=True)
    usable = rejected[:, None] & (mass > LEAST_MASS)
    return jnp.where(usable, left / jnp.where(usable, mass, 1.0), target)


def emit(
    proposal: Proposal, accepted: Int[Array, " B"], last: Int[Array, " B"], state: DecodeState
) -> tuple[Int[Array, "B T"], Int[Array, "B 4"]]:
    """Put the accepted drafts and the last token in a row, cut it at a stop token, count."""
    drafts = proposal.tokens.shape[1]
    slots = jnp.arange(drafts + 1)
    padded = jnp.concatenate([proposal.tokens, last[:, None]], axis=1)
    tokens = jnp.where(slots < accepted[:, None], padded, last[:, None])
    stops = is_stop(tokens, state.stop_ids) & (slots <= accepted[:, None])
    stopped = jnp.any(stops, axis=1)
    first = jnp.argmax(stops, axis=1).astype(jnp.int32)
    inside = stopped & (first < accepted)
    emitted = jnp.where(inside, first + 1, accepted + 1)
    proposed = jnp.where(inside, first + 1, proposal.length)
    done = stopped | (state.cached + emitted >= state.limit)
    counts = jnp.stack([emitted, jnp.minimum(accepted, emitted), proposed, done], axis=1)
    idle = jnp.array([0, 0, 0, 1], jnp.int32)
    return tokens, jnp.where(state.done[:, None], idle, counts.astype(jnp.int32))


def is_stop(tokens: Int[Array, "B T"], stop_ids: Int[Array, "B stop"]) -> Bool[Array, "B T"]:
    return jnp.any(tokens[:, :, None] == stop_ids[:, None, :], axis=-1)


def _drafted(
    laws: Float[Array, "B T V"], proposal: Proposal
) -> tuple[Float[Array, "B P"], Float[Array, "B P"]]:
    """Probability of each drafted token under the target and under the draft."""
    places = proposal.tokens[:, :, None]
    target = jnp.take_along_axis(laws[:, :-1], places, axis=-1)[..., 0]
    draft = jnp.take_along_axis(proposal.probs, places, axis=-1)[..., 0]
    return target, draft


def _proposed(proposal: Proposal) -> Bool[Array, "B P"]:
    return jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]


def _at(values: Array, index: Int[Array, " B"]) -> Array:
    """values[b, index[b]] for every row b."""
    return jax.vmap(lambda row, place: row[place])(values, index)
