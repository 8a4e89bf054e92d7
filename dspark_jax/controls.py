"""Logit controls of a request, applied as if tokens were decoded one at a time.

Order: logit bias, least length, repetition penalty, presence and frequency penalties. The
repetition penalty looks at prompt and output (transformers), the other two at the output alone
(OpenAI's interface). At slot k of a round the output includes the k drafted tokens before it.
Only the target's logits are adjusted: a draft may follow any law.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dspark_jax.state import Controls, RowSettings
from pallas_kernels.platform import unroll_scans


def init_controls(batch: int, vocab_size: int) -> Controls:
    """Neutral controls; `vocab_size` 0 where a run has none."""
    return Controls(
        bias=jnp.zeros((batch, vocab_size), jnp.float32),
        in_prompt=jnp.zeros((batch, vocab_size), bool),
        generated=jnp.zeros((batch, vocab_size), jnp.int32),
        stop_from=jnp.zeros((batch,), jnp.int32),
        repetition=jnp.ones((batch,), jnp.float32),
        presence=jnp.zeros((batch,), jnp.float32),
        frequency=jnp.zeros((batch,), jnp.float32),
    )


def admit_controls(controls: Controls, slot: Int[Array, ""], row: RowSettings) -> Controls:
    """Reset a slot to a request's controls."""
    size = controls.bias.shape[1]
    places = jnp.where(row.bias_ids >= 0, row.bias_ids, size)  # unused places are dropped
    bias = jnp.zeros((size,), jnp.float32).at[places].add(row.bias_values, mode="drop")
    return Controls(
        bias=controls.bias.at[slot].set(bias),
        in_prompt=controls.in_prompt.at[slot].set(False),
        generated=controls.generated.at[slot].set(0),
        stop_from=controls.stop_from.at[slot].set(row.prompt_length + row.min_tokens),
        repetition=controls.repetition.at[slot].set(row.repetition_penalty),
        presence=controls.presence.at[slot].set(row.presence_penalty),
        frequency=controls.frequency.at[slot].set(row.frequency_penalty),
    )


def mark_prompt(
    controls: Controls, slot: Int[Array, ""], tokens: Int[Array, " chunk"], count: Int[Array, ""]
) -> Controls:
    """Note the first `count` tokens as part of a slot's prompt."""
    size = controls.in_prompt.shape[1]
    places = jnp.where(jnp.arange(tokens.shape[0]) < count, tokens, size)
    marked = controls.in_prompt.at[slot, places].set(True, mode="drop")
    return replace(controls, in_prompt=marked)


def count_generated(
    controls: Controls, tokens: Int[Array, "B T"], emitted: Int[Array, " B"]
) -> Controls:
    """Count the first `emitted` tokens of each row as output."""
    batch, width = tokens.shape
    size = controls.generated.shape[1]
    places = jnp.where(jnp.arange(width) < emitted[:, None], tokens, size)
    counted = controls.generated.at[jnp.arange(batch)[:, None], places].add(1, mode="drop")
    return replace(controls, generated=counted)


def adjust(
    logits: Float[Array, "B V"],
    controls: Controls,
    generated: Int[Array, "B V"],
    position: Int[Array, " B"],
    stop_ids: Int[Array, "B stop"],
) -> Float[Array, "B V"]:
    """Logits of the token at `position`, given the output counts before it."""
    size = logits.shape[1]
    logits = logits + controls.bias
    early = (position < controls.stop_from)[:, None] & (stop_ids >= 0)
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, jnp.where(early, stop_ids, size)].set(-jnp.inf, mode="drop")
    seen = controls.in_prompt | (generated > 0)
    penalty = controls.repetition[:, None]
    penalised = jnp.where(logits > 0, logits / penalty, logits * penalty)
    logits = jnp.where(seen, penalised, logits)
    logits = logits - controls.presence[:, None] * (generated > 0)
    return logits - controls.frequency[:, None] * generated


def adjust_block(
    logits: Float[Array, "B T V"],
    drafted: Int[Array, "B P"],
    controls: Controls,
    cached: Int[Array, " B"],
    stop_ids: Int[Array, "B stop"],
) -> Float[Array, "B T V"]:
    """Logits of a whole verify pass: slot k counts the drafts before it as output."""
    rows = jnp.arange(logits.shape[0])
    following = jnp.pad(drafted, ((0, 0), (0, 1)))  # the count after the last slot is never read

    def step(generated: Array, slot: Array) -> tuple[Array, Array]:
        adjusted = adjust(logits[:, slot], controls, generated, cached + 1 + slot, stop_ids)
        return generated.at[rows, following[:, slot]].add(1), adjusted

    slots = jnp.arange(logits.shape[1])
    _, adjusted = jax.lax.scan(step, controls.generated, slots, unroll=unroll_scans())
    return adjusted.swapaxes(0, 1)
