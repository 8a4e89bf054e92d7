"""Possible acceptance of rounds repeated over a freshly prefilled text.

A round's draft reads what earlier rounds wrote into its cache. Here the same text is prefilled in
one go and drafted from with the same keys, so that a wrong write shows as a gap between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dspark_jax import decode
from dspark_jax.accounting import Request
from dspark_jax.config import ModelConfig
from dspark_jax.engine import Engine
from dspark_jax.layers import bind
from dspark_jax.rows import prompt_chunks, row_settings
from dspark_jax.sampling import token_law
from dspark_jax.state import DecodeState, Params, Proposal
from dspark_jax.target import Target


class Replay:
    """Repeats rounds of finished requests, one at a time, in a state of its own."""

    def __init__(self, engine: Engine, rounds_a_request: int) -> None:
        switches = replace(engine.config.decode, sampled=True, ceiling=False)
        self._config = replace(engine.config, decode=switches)
        self._params = engine.params
        self._state = decode.init_state(self._config, 1)
        self._most = rounds_a_request

    def __call__(self, request: Request) -> list[list[float]]:
        """Possible acceptance of each proposed draft, a list a round.

        It is empty for rounds that were not repeated: those that were lie evenly over the request.
        """
        rounds = len(request.acceptance_lengths)
        chosen = set(np.linspace(0, rounds - 1, min(self._most, rounds), dtype=int).tolist())
        ends = np.cumsum([1, *request.acceptance_lengths])  # tokens that each round begins with
        return [
            self._repeat(request, [*request.prompt_ids, *request.token_ids[: ends[index]]])
            if index in chosen
            else []
            for index in range(rounds)
        ]

    def _repeat(self, request: Request, tokens: Sequence[int]) -> list[float]:
        """Prefill all tokens but the anchor, then draft and judge one round."""
        prompt, anchor = tokens[:-1], tokens[-1]
        row = row_settings(len(prompt), request.params, seed=request.seed)
        state = decode.admit(self._config, self._state, np.int32(0), row)
        for chunk in prompt_chunks(prompt, self._config.decode.prefill_chunk):
            state, _ = decode.prefill(self._config, self._params, state, np.int32(0), *chunk)
        state = replace(state, anchor=jnp.full_like(state.anchor, anchor))
        self._state, proposal = decode.draft_step(self._config, self._params, state)
        possible = _shared_mass(self._config, self._params, self._state, proposal)
        return possible[0, : int(proposal.length[0])].tolist()


@partial(jax.jit, static_argnums=0)
def _shared_mass(
    config: ModelConfig, params: Params, state: DecodeState, proposal: Proposal
) -> Float[Array, "B P"]:
    """sum(min(draft law, target law)) at each drafted position, given the drafts before it."""
    target = bind(Target, config.target, config.dtype, params["target"])
    tokens = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    hidden, _, _ = target(tokens, state.target, state.cached, (), config.decode.implementation)
    laws = token_law(target.logits(hidden[:, :-1]), state.sampling)
    return jnp.sum(jnp.minimum(laws, proposal.probs), axis=-1)
