"""Hundreds of requests of every kind through eight slots: each gives what it gives alone.

`python -m tests.test_many_requests 2000` prints how memory goes over so many requests.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
import pytest

from dspark_jax import SamplingParams, costs, load
from dspark_jax.accounting import Request
from dspark_jax.engine import Engine
from tests import tiny

SLOTS, REQUESTS, CANCELLED, REFUSED = 8, 200, 20, 10
# A batch of them needs one of three programs, whichever come together.
KINDS = (
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5, min_tokens=3, logprobs=2),
    SamplingParams(temperature=0.0, stop=("\n", "self")),
    SamplingParams(temperature=0.8, top_k=30, stop=("a", "(")),
)
compilations: list[str] = []  # names of what jax has traced or compiled, in this process
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compilations.append(name) if "/compile/" in name else None
)


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams


def asked(engine: Engine, count: int, seed: int = 0) -> Iterator[Asked]:
    """Requests of mixed length, settings and seeds; prompts take one to four chunks."""
    rng = random.Random(seed)
    size = engine.config.target.vocab_size
    for number in range(count):
        prompt = [rng.randrange(1, size) for _ in range(rng.choice((1, 5, 12, 16, 17, 40, 60)))]
        most = rng.choice((3, 6, 10, 16))
        kind = KINDS[number % len(KINDS)]
        yield Asked(prompt, replace(kind, max_tokens=most, seed=rng.randrange(2**64)))


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = load(dtype="float32", max_length=96, max_batch=SLOTS, prefill_chunk=16)
    made.warmup(KINDS, batches=[SLOTS])
    return made


def outcome(request: Request) -> tuple[Any, ...]:
    result = request.result()
    return result.token_ids, result.text, result.finish_reason


def rounds(request: Request) -> tuple[Any, ...]:
    result = request.result()
    lengths = (result.acceptance_lengths, result.proposal_lengths, result.accepted_drafts)
    return *lengths, result.from_draft


def alone(engine: Engine, one: Asked) -> Request:
    (request,) = engine.prepare([one.prompt], one.params)
    for _ in engine.serve([request]):
        pass
    return request


def waits(request: Request) -> bool:
    return request.prefilled == 0


def reads(request: Request) -> bool:
    return 0 < request.prefilled < len(request.prompt_ids)


def runs(request: Request) -> bool:
    return len(request.token_ids) > 1


def drive(engine: Engine, wanted: list[Asked]) -> tuple[list[Request], set[int]]:
    """All requests in waves, with some refused between them, and some cancelled in each state."""
    waves, handles, cancelled = iter(wanted), [], set()
    states = [waits, reads, runs, runs] * (CANCELLED // 4)
    size = REQUESTS // 2
    while engine.busy or len(handles) < len(wanted):
        for one in islice(waves, size):
            handles.append(engine.submit(one.prompt, one.params))
            if len(handles) % (REQUESTS // REFUSED) == 0:
                with pytest.raises(ValueError, match="above max_length 96"):
                    engine.submit([1] * 90, SamplingParams(max_tokens=7))
        size = 3
        engine.step()
        found = (i for i, one in enumerate(handles) if not one.finish_reason and states[0](one))
        if states and (index := next(found, None)) is not None:
            engine.cancel(handles[index])
            cancelled.add(index)
            states.pop(0)
    return handles, cancelled


def check_all(engine: Engine, solo: Engine) -> Iterator[tuple[Request, Request]]:
    """All requests in company and alone; gives the pairs of those that were not cancelled."""
    wanted = list(asked(engine, REQUESTS))
    before = len(compilations)
    handles, cancelled = drive(engine, wanted)
    assert compilations[before:] == [], "requests come and go without a trace"
    assert len(cancelled) == CANCELLED
    assert {handle.finish_reason for handle in handles} == {"stop", "length", "cancelled"}
    for index, (one, handle) in enumerate(zip(wanted, handles, strict=True)):
        expected = alone(solo, one)
        assert (handle.finish_reason == "cancelled") == (index in cancelled)
        if index in cancelled:
            kept = handle.token_ids
            assert kept == expected.token_ids[: len(kept)]
            continue
        assert outcome(handle) == outcome(expected), f"request {index}: {one}"
        reported = (found.result().logprobs or [] for found in (handle, expected))
        for mine, theirs in zip(*reported, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
        yield handle, expected


def test_every_output_equals_its_solo_run(engine: Engine) -> None:
    solo = load(dtype="float32", max_length=96, max_batch=1, prefill_chunk=16)
    for handle, expected in check_all(engine, solo):
        assert rounds(handle) == rounds(expected)


def test_every_output_equals_plain_decoding_whatever_is_scheduled(monkeypatch, tmp_path) -> None:
    """Greedy rows, and all rows under Gumbel verification."""
    monkeypatch.setattr(costs, "FOLDER", tmp_path)  # none of this machine's user
    sizes = {"dtype": "float32", "max_length": 96, "prefill_chunk": 16}
    solo = load(draft=False, max_batch=1, **sizes)
    notes: list[str] = []
    options = {"verification": "scheduled", "rejection": "gumbel", "report": notes.append}
    with tiny.quick_compilation():
        engine = load(max_batch=SLOTS, **sizes, **options)
        engine.warmup(KINDS, batches=[SLOTS])
    assert any("a model of them is used" in note for note in notes)
    lengths = [n for handle, _ in check_all(engine, solo) for n in rounds(handle)[1]]
    assert len(set(lengths)) > 3
    assert lengths.count(0) > 0  # some rounds rested


def resident() -> int:
    """Bytes of this process in memory, now."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def held() -> tuple[int, int, int]:
    """Live jax arrays, their bytes, and requests that something still holds."""
    gc.collect()
    arrays = jax.live_arrays()
    requests = sum(type(one) is Request for one in gc.get_objects())  # asks no object anything
    return len(arrays), sum(array.nbytes for array in arrays), requests


def serve_some(engine: Engine, count: int, seed: int) -> None:
    """Requests, some of them cancelled; then a batch that always leaves the same state."""
    handles = [engine.submit(one.prompt, one.params) for one in asked(engine, count, seed)]
    while engine.busy:
        engine.step()
        chosen = next((one for one in handles[::5] if not one.finish_reason), None)
        if chosen:
            engine.cancel(chosen)
    engine.generate([[1, 2, 3]] * SLOTS, replace(KINDS[0], max_tokens=4))


def check_memory(engine: Engine, count: int, parts: int = 4) -> list[tuple[int, int, int, int]]:
    """Serve `count` requests in parts; nothing may be held after one that was not before."""
    serve_some(engine, count // parts, seed=99)
    found = [(resident(), *held())]
    for part in range(parts):
        serve_some(engine, count // parts, seed=part)
        found.append((resident(), *held()))
        assert found[-1][1:] == found[0][1:]
        assert found[-1][0] - found[0][0] < 16 * 2**20
    return found


def test_memory_stays_flat(engine: Engine) -> None:
    check_memory(engine, 160)


if __name__ == "__main__":
    made = load(dtype="float32", max_length=96, max_batch=SLOTS, prefill_chunk=16)
    made.warmup(KINDS)
    total = int(sys.argv[1])
    for index, row in enumerate(check_memory(made, total, parts=10)):
        print(f"part {index}: {row[0] / 2**20:.1f} MiB resident; arrays, bytes, requests {row[1:]}")
