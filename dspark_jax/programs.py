"""The compiled entry points that an engine calls, each compiled once and before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax import decode
from dspark_jax.config import ModelConfig
from dspark_jax.request import MAX_LOGPROBS, SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.scheduler import Request, batch_tier
from dspark_jax.sharding import abstract_state, use_mesh
from dspark_jax.state import MAX_ROUNDS, DecodeState, FirstToken, Params, Rounds, RowSettings
from dspark_jax.text import TextStream

LOGPROB_TIERS = (0, 1, 5, MAX_LOGPROBS)


@dataclass(frozen=True)
class Tier:
    """What a batch needs of its programs; each value is a program of its own.

    A batch of greedy rows builds no noise and no laws, one without logit controls holds no state
    for them, and log-probabilities are computed where a row wants them.
    """

    batch: int
    sampled: bool = True
    controls: bool = False
    logprobs: int = 0

    @staticmethod
    def of(requests: Sequence[Request], max_batch: int, parts: int = 1) -> Tier:
        """The least tier that serves the requests of a turn, its slots split in equal parts."""
        params = [request.params for request in requests]
        wanted = max(0 if one.logprobs is None else max(one.logprobs, 1) for one in params)
        return Tier(
            batch=-(-batch_tier(len(requests), max_batch) // parts) * parts,
            sampled=not all(one.greedy for one in params),
            controls=any(one.controlled for one in params),
            logprobs=next(tier for tier in LOGPROB_TIERS if tier >= wanted),
        )

    def configure(self, config: ModelConfig) -> ModelConfig:
        """The static configuration of this tier's programs."""
        decode = replace(
            config.decode,
            sampled=self.sampled or config.decode.ceiling,
            controls=self.controls,
            logprobs=self.logprobs,
        )
        return replace(config, decode=decode)


class Programs:
    """`admit`, `prefill` and `decode_rounds`, compiled by tier and called by request.

    Only what `compile_missing` was asked for is compiled. `admit` and `prefill` serve greedy and
    sampled rows alike, so they are shared by those tiers.
    """

    def __init__(self, config: ModelConfig, params: Params, mesh: Mesh | None = None) -> None:
        self.config = config
        self._params = params
        self._mesh = mesh
        self._compiled: dict[tuple[str, Tier], Callable[..., Any]] = {}

    def compile_missing(self, tier: Tier) -> bool:
        """Trace and compile what a tier needs and was not compiled before; False: nothing was."""
        build = partial(decode.init_state, tier.configure(self.config), tier.batch)
        state = abstract_state(build, self._mesh)
        slot, chunk = np.int32(0), np.zeros(self.config.decode.prefill_chunk, np.int32)
        row = _row(Request([], SamplingParams(), 0, (), TextStream(None)))
        inputs = {
            decode.admit: (state, slot, row),
            decode.prefill: (self._params, state, slot, chunk, np.int32(0), np.bool_(False)),
            decode.decode_rounds: (self._params, state, np.int32(1)),
        }
        with use_mesh(self._mesh):
            missing = {
                key: entry.lower(key[1].configure(self.config), *arguments)
                for entry, arguments in inputs.items()
                if (key := _key(entry, tier)) not in self._compiled
            }
        with ThreadPoolExecutor(len(inputs)) as pool:  # XLA compiles outside the interpreter's lock
            compiled = pool.map(lambda lowered: lowered.compile(), missing.values())
            self._compiled |= zip(missing, compiled, strict=True)
        return bool(missing)

    def warm_up(self, tier: Tier, state: DecodeState) -> DecodeState:
        """Run each entry point once: a first run loads code and touches memory.

        Leaves garbage rows and a slot that is still running.
        """
        request = Request([0], SamplingParams(max_tokens=1), 0, (), TextStream(None))
        state, _ = self.admit(tier, state, 0, request)
        return self.run_rounds(tier, state, 1)[0]

    def admit(
        self, tier: Tier, state: DecodeState, slot: int, request: Request
    ) -> tuple[DecodeState, FirstToken]:
        """Give a slot to a request and run its prompt; returns the state and its first token."""
        chunk = self.config.decode.prefill_chunk
        prompt = np.asarray(request.prompt_ids, np.int32)
        prefill = self._compiled[_key(decode.prefill, tier)]
        state = self._compiled[_key(decode.admit, tier)](state, np.int32(slot), _row(request))
        for begin in range(0, len(prompt), chunk):
            part = prompt[begin : begin + chunk]
            state, first = prefill(
                self._params,
                state,
                np.int32(slot),
                np.pad(part, (0, chunk - len(part))),
                np.int32(len(part)),
                np.bool_(begin + chunk >= len(prompt)),
            )
        return state, first

    def run_rounds(self, tier: Tier, state: DecodeState, rounds: int) -> tuple[DecodeState, Rounds]:
        """Run up to `rounds` rounds in one call; the rounds come back on the host."""
        count = np.int32(min(rounds, MAX_ROUNDS))
        run = self._compiled[_key(decode.decode_rounds, tier)]
        state, out = run(self._params, state, count)
        return state, jax.device_get(out)


def _key(entry: Callable[..., Any], tier: Tier) -> tuple[str, Tier]:
    """An entry point and the tier without the switches that do not change it."""
    if entry is decode.admit:
        return "admit", replace(tier, sampled=True, logprobs=0)
    if entry is decode.prefill:
        return "prefill", replace(tier, sampled=True)
    return "rounds", tier


def _row(request: Request) -> RowSettings:
    return row_settings(
        len(request.prompt_ids), request.params, seed=request.seed, stop_ids=request.stop_ids
    )
