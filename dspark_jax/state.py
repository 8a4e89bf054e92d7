"""Every pytree that crosses a function boundary. No field is ever None; shapes are static."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Float, Int, UInt32

MAX_STOP_IDS = 64  # stop tokens a row can hold; unused places are -1
MAX_ROUNDS = 16  # rounds that one call of `decode_rounds` can run

Params = dict[str, Any]  # {"target": ..., "draft": ...}: nested dicts of arrays


@struct.dataclass
class KVCache:
    """Keys and values, one pair of arrays a layer: rows at or past a row's length are garbage."""

    k: tuple[Float[Array, "B S K H"], ...]
    v: tuple[Float[Array, "B S K H"], ...]


@struct.dataclass
class Sampling:
    """What a row asked of the sampler. `seed` holds the high and the low 32 bits."""

    temperature: Float[Array, " B"]
    top_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    min_p: Float[Array, " B"]
    seed: UInt32[Array, "B 2"]


@struct.dataclass
class Controls:
    """Logit controls of each row; the wide fields have width 0 in a run without controls."""

    bias: Float[Array, "B V"]
    in_prompt: Bool[Array, "B V"]
    generated: Int[Array, "B V"]  # output tokens so far, the anchor included
    stop_from: Int[Array, " B"]  # first position at which a stop token may be drawn
    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]


@struct.dataclass
class RowSettings:
    """One request as `admit` takes it: `Sampling`, when it ends, its stop tokens, `Controls`."""

    prompt_length: Int[Array, ""]
    max_tokens: Int[Array, ""]
    temperature: Float[Array, ""]
    top_p: Float[Array, ""]
    top_k: Int[Array, ""]
    min_p: Float[Array, ""]
    seed: UInt32[Array, " 2"]
    stop_ids: Int[Array, " stop"]
    min_tokens: Int[Array, ""]
    repetition_penalty: Float[Array, ""]
    presence_penalty: Float[Array, ""]
    frequency_penalty: Float[Array, ""]
    bias_ids: Int[Array, " bias"]
    bias_values: Float[Array, " bias"]


@struct.dataclass
class ContextRows:
    """Committed rows as a drafter absorbs them; features have width 0 without taps."""

    tokens: Int[Array, "B T"]
    features: Float[Array, "B T CD"]


@struct.dataclass
class Gains:
    """What drafting has brought lately, for the choice of whether the next round drafts.

    `rounds` and `tokens` are of each row: drafted rounds, and the mean of what one emitted. `price`
    is the mean cost of a drafted round in plain rounds, `idle` the rounds since the last one,
    `wait` how many of them may pass before drafting is tried again.
    """

    rounds: Int[Array, " B"]
    tokens: Float[Array, " B"]
    price: Float[Array, ""]
    idle: Int[Array, ""]
    wait: Int[Array, ""]


@struct.dataclass
class DecodeState:
    """All rows of a batch between two rounds.

    `cached` counts the true rows of the target cache and is the absolute position of `anchor`,
    the last committed token. The drafter's own state (a draft's KVCache) is true below
    `cached - context_len`; the rows between wait in `context`. A commit only advances `cached`:
    nothing is rolled back.
    """

    cached: Int[Array, " B"]
    anchor: Int[Array, " B"]
    limit: Int[Array, " B"]  # prompt + max_tokens: a row runs rounds while cached < limit
    done: Bool[Array, " B"]
    stop_ids: Int[Array, "B stop"]
    sampling: Sampling
    controls: Controls
    target: KVCache
    draft: Any
    context: ContextRows  # committed rows that the drafter has yet to absorb
    context_len: Int[Array, " B"]
    gains: Any  # Gains where verification is scheduled, else ()


@struct.dataclass
class Proposal:
    """What a drafter offers: P tokens a row, of which the first `length` are to be verified.

    `probs[b, k]` is the very law that `tokens[b, k]` was drawn from, over target ids (width 0 in
    the greedy tier). `confidence` holds logits (width 0 without a confidence head).
    """

    tokens: Int[Array, "B P"]
    length: Int[Array, " B"]
    probs: Float[Array, "B P V"]
    confidence: Float[Array, "B C"]


@struct.dataclass
class Logprobs:
    """Log-probabilities under the target: the token itself first, then the most likely ones.

    They are of the model's own law, before temperature, filters and controls; width 0 where none
    were asked for.
    """

    ids: Int[Array, "*rows W"]
    values: Float[Array, "*rows W"]


@struct.dataclass
class FirstToken:
    """The token that prefill drew; meaningless before the last chunk."""

    token: Int[Array, ""]
    logprobs: Logprobs


@struct.dataclass
class StepOutput:
    """What one round emitted: the first counts[:, 0] of `tokens` are real.

    `counts` columns: tokens emitted (0 for a row that was finished before), drafts among them,
    drafts proposed, and 1 where the row is finished now. `possible` is the chance that the draft's
    and the target's law allow each proposed token (width 0 where it was not asked for).
    """

    tokens: Int[Array, "B T"]
    counts: Int[Array, "B 4"]
    logprobs: Logprobs
    possible: Float[Array, "B P"]


@struct.dataclass
class Rounds:
    """`StepOutput` of up to R rounds; a round that did not run has zero counts."""

    tokens: Int[Array, "B R T"]
    counts: Int[Array, "B R 4"]
    logprobs: Logprobs
    possible: Float[Array, "B R P"]
