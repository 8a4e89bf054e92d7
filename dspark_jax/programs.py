"""The compiled entry points that an engine calls, each compiled once and before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from dspark_jax import decode
from dspark_jax.config import ModelConfig
from dspark_jax.request import SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.scheduler import Request
from dspark_jax.state import (
    MAX_ROUNDS,
    DecodeState,
    FirstToken,
    Params,
    Rounds,
    RowSettings,
)
from dspark_jax.text import TextStream


class Programs:
    """`admit`, `prefill` and `decode_rounds` of one batch size, in terms of requests.

    Rounds come in two tiers: the greedy one, for batches in which every row is greedy, and the
    one that serves any temperature. Only what `compile_missing` was asked for is compiled.
    """

    def __init__(self, config: ModelConfig, params: Params, batch: int) -> None:
        self.config = config
        self.batch = batch
        self._params = params
        self._compiled: dict[str, Callable[..., Any]] = {}

    def compile_missing(self, sampled: bool) -> None:
        """Trace and compile the entry points of a tier that were not compiled before."""
        state = jax.eval_shape(partial(decode.init_state, self.config, self.batch))
        slot, chunk = np.int32(0), np.zeros(self.config.decode.prefill_chunk, np.int32)
        row = _row(Request([], SamplingParams(), 0, (), TextStream(None)))
        tier = replace(self.config, decode=replace(self.config.decode, sampled=sampled))
        wanted = {
            "admit": lambda: decode.admit.lower(self.config, state, slot, row),
            "prefill": lambda: decode.prefill.lower(
                self.config, self._params, state, slot, chunk, np.int32(0), np.bool_(False)
            ),
            _rounds_name(sampled): lambda: decode.decode_rounds.lower(
                tier, self._params, state, np.int32(1)
            ),
        }
        lowered = {name: trace() for name, trace in wanted.items() if name not in self._compiled}
        with ThreadPoolExecutor(len(wanted)) as pool:  # XLA compiles outside the interpreter's lock
            compiled = pool.map(lambda one: one.compile(), lowered.values())
            self._compiled |= zip(lowered, compiled, strict=True)

    def admit(
        self, state: DecodeState, slot: int, request: Request
    ) -> tuple[DecodeState, FirstToken]:
        """Give a slot to a request and run its prompt; returns the state and its first token."""
        chunk = self.config.decode.prefill_chunk
        prompt = np.asarray(request.prompt_ids, np.int32)
        state = self._compiled["admit"](state, np.int32(slot), _row(request))
        first = None
        for begin in range(0, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            state, first = self._compiled["prefill"](
                self._params,
                state,
                np.int32(slot),
                np.pad(part, (0, chunk - len(part))),
                np.int32(len(part)),
                np.bool_(begin + chunk >= len(prompt)),
            )
        return state, first

    def run_rounds(
        self, state: DecodeState, sampled: bool, rounds: int
    ) -> tuple[DecodeState, Rounds]:
        """Run up to `rounds` rounds in one call; the rounds come back on the host."""
        count = np.int32(min(rounds, MAX_ROUNDS))
        state, out = self._compiled[_rounds_name(sampled)](self._params, state, count)
        return state, jax.device_get(out)


def _row(request: Request) -> RowSettings:
    return row_settings(
        len(request.prompt_ids), request.params, seed=request.seed, stop_ids=request.stop_ids
    )


def _rounds_name(sampled: bool) -> str:
    return "sampled rounds" if sampled else "greedy rounds"
