"""Every random key that the jitted code really uses, counted over whole runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import decode, draft, sampling, verify
from dspark_jax.sampling import Stream
from tests import tiny
from tests.tiny import Request, agreeing_params, decoding, plain_config, tiny_config

MODULES = (decode, draft, sampling, verify)
CONFIG = tiny_config(block=4, max_length=128)
REQUESTS = [
    Request([1, 2, 3], 60, temperature=1.0, seed=1),
    Request(list(range(20)), 50, temperature=0.7, top_p=0.9, seed=2),
    Request([5], 40, temperature=1.4, seed=2 << 32),
]


@dataclass
class Use:
    """One key a row."""

    stream: Stream
    positions: list[int]
    keys: list[tuple[int, ...]]


@dataclass
class Recorder:
    uses: list[Use] = field(default_factory=list)

    def take(self) -> list[Use]:
        jax.effects_barrier()
        taken, self.uses = self.uses, []
        return taken


@pytest.fixture
def recorder(monkeypatch) -> Iterator[Recorder]:
    """Report every key from inside freshly jitted entry points."""
    log = Recorder()
    original = sampling.stream_keys

    def reporting(settings: Any, stream: Stream, position: Any, slot: Any = 0) -> Any:
        keys = original(settings, stream, position, slot)

        def note(positions: np.ndarray, data: np.ndarray) -> None:
            log.uses.append(Use(stream, positions.tolist(), [tuple(k) for k in data.tolist()]))

        jax.debug.callback(note, position, jax.random.key_data(keys))
        return keys

    for module in MODULES:
        if hasattr(module, "stream_keys"):
            monkeypatch.setattr(module, "stream_keys", reporting)
    for name in ("admit", "prefill", "decode_round"):
        monkeypatch.setattr(decode, name, _rejitted(getattr(decode, name).__wrapped__))
    with tiny.quick_compilation():
        yield log


def _rejitted(step: Callable[..., Any]) -> Callable[..., Any]:
    """Traced anew: traces are kept by function, and an old one reports to an old recorder."""
    return jax.jit(lambda *arguments: step(*arguments), static_argnums=0)


def uses_by_round(config: Any, params: Any, recorder: Recorder) -> Iterator[tuple[Any, list[Use]]]:
    """Rows that were running and the keys used: of the prompts one by one, then of each round."""
    state = decode.init_state(config, len(REQUESTS))
    for slot, request in enumerate(REQUESTS):
        state, _ = tiny.start(config, params, state, slot, request)
        for use in recorder.take():
            yield [slot], [Use(use.stream, [-1] * slot + use.positions, [()] * slot + use.keys)]
    while not bool(state.done.all()):
        live = np.flatnonzero(~np.asarray(state.done)).tolist()
        state, _, _ = tiny.one_round(config, params, state)
        yield live, recorder.take()


@pytest.mark.parametrize("rejection", ["token", "block"])
def test_no_key_is_used_twice(recorder: Recorder, rejection: str) -> None:
    config = decoding(CONFIG, rejection=rejection)
    seen: set[tuple[int, ...]] = set()
    rounds = 0
    for live, uses in uses_by_round(config, agreeing_params(config), recorder):
        if len(uses) > 1:
            rounds += 1
            drafts = config.decode.num_drafts
            expected = [Stream.DRAFT] * drafts + [Stream.COIN] * drafts + [Stream.TARGET]
            assert sorted(use.stream for use in uses) == sorted(expected)
        for use in uses:
            for row in live:
                assert use.keys[row] not in seen
                seen.add(use.keys[row])
    assert rounds >= 15
    assert len(seen) > 400


def test_gumbel_verification_shares_the_keys_of_plain_decoding(recorder: Recorder) -> None:
    config = decoding(CONFIG, rejection="gumbel")
    params = agreeing_params(config)
    keyed: list[dict[tuple[int, int], tuple[int, ...]]] = []
    for one in (config, plain_config(config)):
        table: dict[tuple[int, int], tuple[int, ...]] = {}
        for live, uses in uses_by_round(one, params, recorder):
            for use in uses:
                assert use.stream is Stream.TARGET
                for row in live:
                    place = (row, use.positions[row])
                    assert table.setdefault(place, use.keys[row]) == use.keys[row]
        assert len(set(table.values())) == len(table), "one key a row and position"
        keyed.append(table)
    drafted, plain = keyed
    assert plain.items() <= drafted.items()


def test_streams_slots_and_seeds_never_meet() -> None:
    seeds = np.array([(0, 0), (0, 1), (1, 0), (2**32 - 1, 7)], np.uint32)
    positions = np.tile(np.arange(40), len(seeds))
    settings = sampling.Sampling(
        *(jnp.zeros(len(positions)) for _ in range(4)), seed=jnp.asarray(seeds.repeat(40, axis=0))
    )

    @jax.jit
    def keys(slot: Any) -> Any:
        streams = [
            sampling.stream_keys(settings, one, jnp.array(positions), slot) for one in Stream
        ]
        return jax.random.key_data(jnp.stack(streams))

    every = np.concatenate([np.asarray(keys(slot)).reshape(-1, 2) for slot in range(16)])
    assert len(np.unique(every, axis=0)) == len(every) == 3 * 40 * 16 * len(seeds)
