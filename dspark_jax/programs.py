"""The compiled entry points that an engine calls, each compiled once and before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax import decode
from dspark_jax.accounting import Request
from dspark_jax.compiler import compiler_options
from dspark_jax.config import ModelConfig
from dspark_jax.controls import init_controls
from dspark_jax.placement import release
from dspark_jax.request import MAX_LOGPROBS, SamplingParams
from dspark_jax.rows import row_settings
from dspark_jax.scheduler import PromptChunk
from dspark_jax.sharding import abstract_state, state_maker, use_mesh
from dspark_jax.state import MAX_ROUNDS, DecodeState, FirstToken, Params, Rounds, RowSettings
from dspark_jax.text import TextStream

LOGPROB_TIERS = (0, 1, 5, MAX_LOGPROBS)


@dataclass(frozen=True)
class Tier:
    """What a batch needs of its programs; each value is a program of its own.

    A batch of greedy rows builds no noise and no laws, one without logit controls holds no state
    for them, and log-probabilities are computed where a row wants them. In float32 a row's
    tokens are the same in every tier that serves it.
    """

    batch: int
    sampled: bool = True
    controls: bool = False
    logprobs: int = 0

    @staticmethod
    def of(each: Sequence[SamplingParams], batch: int) -> Tier:
        """The least tier that serves such requests."""
        wanted = [0 if one.logprobs is None else max(one.logprobs, 1) for one in each]
        most = max(wanted, default=0)
        return Tier(
            batch=batch,
            sampled=not all(one.greedy for one in each),
            controls=any(one.controlled for one in each),
            logprobs=next(tier for tier in LOGPROB_TIERS if tier >= most),
        )

    @property
    def _switches(self) -> tuple[bool, int, bool]:
        return self.controls, self.logprobs, self.sampled  # what costs most comes first

    def serves(self, need: Tier) -> bool:
        """Whether rows that need `need` can run in this tier."""
        pairs = zip(self._switches, need._switches, strict=True)
        return self.batch == need.batch and all(mine >= theirs for mine, theirs in pairs)

    def least(self, tiers: Collection[Tier]) -> Tier | None:
        """The cheapest of some tiers that serves this need; None where none does."""
        serving = [tier for tier in tiers if tier.serves(self)]
        return min(serving, key=lambda tier: tier._switches, default=None)

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
    """The entry points, compiled by tier and called by request; no call waits for its result.

    Only what `compile_missing` was asked for is compiled. What serves greedy and sampled rows
    alike is shared by those tiers.
    """

    def __init__(self, config: ModelConfig, params: Params, mesh: Mesh | None = None) -> None:
        self.config = config
        self._params = params
        self._mesh = mesh
        self._compiled: dict[tuple[str, Tier], Callable[..., Any]] = {}

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that can run as they are."""
        return [tier for name, tier in self._compiled if name == "rounds"]

    def compile_missing(self, tier: Tier) -> bool:
        """Trace and compile what a tier needs and was not compiled before; False: nothing was."""
        if tier in self.tiers:
            return False
        width = self.config.target.vocab_size if tier.controls else 0
        build = partial(decode.init_state, tier.configure(self.config), tier.batch)
        state = abstract_state(build, self._mesh)
        slot, chunk = np.int32(0), np.zeros(self.config.decode.prefill_chunk, np.int32)
        row = _row(Request([], SamplingParams(), 0, (), TextStream(None)))
        prompt = (slot, chunk, np.int32(0), np.bool_(False))
        makers: dict[str, Callable[[], Any]] = {
            "state": build,
            "controls": partial(init_controls, tier.batch, width),
        }
        inputs: dict[str, tuple[Any, ...]] = {
            "admit": (decode.admit, state, slot, row),
            "prefill": (decode.prefill, self._params, state, *prompt),
            "rounds": (decode.decode_rounds, self._params, state, np.int32(1)),
            "release": (release, state, np.zeros(tier.batch, bool)),
        }
        with use_mesh(self._mesh):
            missing = {
                key: entry.lower(key[1].configure(self.config), *arguments)
                for name, (entry, *arguments) in inputs.items()
                if (key := _key(name, tier)) not in self._compiled
            }
        missing |= {
            key: state_maker(maker, self._mesh).lower()
            for name, maker in makers.items()
            if (key := _key(name, tier)) not in self._compiled
        }
        options = compiler_options()
        with ThreadPoolExecutor(len(inputs)) as pool:  # XLA compiles outside the interpreter's lock
            compiled = pool.map(lambda lowered: lowered.compile(options), missing.values())
            self._compiled |= zip(missing, compiled, strict=True)
        return True

    def new_state(self, tier: Tier) -> DecodeState:
        """An empty state for a tier."""
        return self._compiled[_key("state", tier)]()

    def fit_controls(self, tier: Tier, state: DecodeState) -> DecodeState:
        """Hold logit controls, or hold none, as a tier needs; every row's are neutral then.

        For a state of which no row that goes on has controls of its own.
        """
        if (state.controls.bias.shape[1] > 0) == tier.controls:
            return state
        return replace(state, controls=self._compiled[_key("controls", tier)]())

    def warm_up(self, tier: Tier, state: DecodeState) -> DecodeState:
        """Run each entry point once: a first run loads code and touches memory.

        Leaves garbage rows, all of them finished.
        """
        request = Request([0], SamplingParams(max_tokens=1), 0, (), TextStream(None))
        state = self.admit(tier, state, 0, request)
        state, _ = self.prefill(tier, state, PromptChunk(0, request, [0], last=True))
        state, _ = self.run_rounds(tier, state, 1)
        state = self.release(tier, state, range(tier.batch))
        return jax.block_until_ready(state)  # or the first request would be timed with it

    def admit(self, tier: Tier, state: DecodeState, slot: int, request: Request) -> DecodeState:
        """Give a slot to a request."""
        return self._compiled[_key("admit", tier)](state, np.int32(slot), _row(request))

    def prefill(
        self, tier: Tier, state: DecodeState, chunk: PromptChunk
    ) -> tuple[DecodeState, FirstToken]:
        """Run some of a prompt; the token means something after the last chunk only."""
        count = len(chunk.token_ids)
        tokens = np.zeros(self.config.decode.prefill_chunk, np.int32)
        tokens[:count] = chunk.token_ids
        run = self._compiled[_key("prefill", tier)]
        slot, last = np.int32(chunk.slot), np.bool_(chunk.last)
        return run(self._params, state, slot, tokens, np.int32(count), last)

    def run_rounds(self, tier: Tier, state: DecodeState, rounds: int) -> tuple[DecodeState, Rounds]:
        """Run up to `rounds` rounds in one call."""
        count = np.int32(min(rounds, MAX_ROUNDS))
        return self._compiled[_key("rounds", tier)](self._params, state, count)

    def release(self, tier: Tier, state: DecodeState, slots: Collection[int]) -> DecodeState:
        """Finish and empty the rows of some slots."""
        named = np.zeros(tier.batch, bool)
        named[list(slots)] = True
        return self._compiled[_key("release", tier)](state, named)


def _key(name: str, tier: Tier) -> tuple[str, Tier]:
    """An entry point and the tier without the switches that do not change it."""
    if name == "rounds":
        return name, tier
    if name == "prefill":
        return name, replace(tier, sampled=True)
    return name, replace(tier, sampled=True, logprobs=0)


def _row(request: Request) -> RowSettings:
    return row_settings(
        len(request.prompt_ids), request.params, seed=request.seed, stop_ids=request.stop_ids
    )
