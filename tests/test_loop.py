"""Submitted requests on a tiny pair: steps, tiers, sizes, cancelling, failing, asyncio, threads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from dspark_jax import loop
from dspark_jax.engine import SERVE_ROUNDS, STREAM_ROUNDS, Engine
from dspark_jax.programs import Programs, Tier
from dspark_jax.request import SamplingParams
from dspark_jax.scheduler import PATIENCE
from dspark_jax.state import MAX_ROUNDS
from tests.tiny import quick_compilation, random_params, tiny_config

CONFIG = tiny_config(vocab=17)
PARAMS = random_params(CONFIG, scale=0.15)
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8], [9, 8, 7], list(range(9)), [5] * 17, [2] * 30]
GREEDY = SamplingParams(max_tokens=12)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
STEERED = replace(DRAWN, presence_penalty=0.7, logprobs=1)


@pytest.fixture(scope="module", autouse=True)
def compile_quickly():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def engine():
    return Engine(CONFIG, PARAMS, max_batch=4, report=lambda _: None)


@pytest.fixture(scope="module")
def solo():
    """The tokens of a prompt that runs alone, in an engine of one slot."""
    alone = Engine(CONFIG, PARAMS, max_batch=1, report=lambda _: None)
    return lambda prompt, params: alone.generate([prompt], params)[0].token_ids


def finish(engine):
    while engine.busy:
        engine.step()


def state_tier(engine):
    return engine._loop._tier


def test_steps_tell_what_changed_and_the_result_is_the_solo_one(engine, solo):
    first, second = engine.submit(PROMPTS[0], GREEDY), engine.submit(PROMPTS[3], DRAWN)
    assert engine.busy
    assert set(engine.step()) == {first, second}
    assert (first.token_ids, second.token_ids) == (
        solo(PROMPTS[0], GREEDY)[:1],
        solo(PROMPTS[3], DRAWN)[:1],
    )  # what prefill drew; rounds are on their way
    while first.finish_reason is None:
        before = len(first.acceptance_lengths)
        assert first in engine.step()
        assert 0 < len(first.acceptance_lengths) - before <= SERVE_ROUNDS
    finish(engine)
    assert engine.step() == []
    assert first.result().token_ids == solo(PROMPTS[0], GREEDY)
    assert second.result().token_ids == solo(PROMPTS[3], DRAWN)
    assert second.result().finish_reason == "length"


def test_the_next_call_is_sent_before_the_last_result_is_read(engine, monkeypatch):
    engine.warmup(GREEDY, batches=[1])
    events, run_rounds, read = [], Programs.run_rounds, loop._read_rounds

    def sent(*arguments):
        events.append("sent")
        return run_rounds(*arguments)

    def seen(call):
        events.append("read")
        return read(call)

    monkeypatch.setattr(Programs, "run_rounds", sent)
    monkeypatch.setattr(loop, "_read_rounds", seen)
    (result,) = engine.generate([PROMPTS[0]], replace(GREEDY, max_tokens=60))
    calls = -(-len(result.acceptance_lengths) // MAX_ROUNDS)
    assert calls > 1
    assert events == ["sent"] + ["sent", "read"] * calls


def test_rows_run_on_while_another_prompt_is_read(engine, solo):
    long = [1 + i % 15 for i in range(50)]  # seven chunks of eight
    runs = engine.submit(PROMPTS[0], replace(GREEDY, max_tokens=40), rounds=STREAM_ROUNDS)
    engine.step()
    engine.step()
    late = engine.submit(long, GREEDY, rounds=STREAM_ROUNDS)
    gained = []
    while not late.token_ids:
        before = len(runs.token_ids)
        engine.step()
        gained.append(len(runs.token_ids) - before)
    assert len(gained) == 2  # four chunks, then three
    assert min(gained) > 0
    finish(engine)
    assert late.token_ids == solo(long, GREEDY)
    assert runs.token_ids == solo(PROMPTS[0], replace(GREEDY, max_tokens=40))


def test_a_row_keeps_its_tokens_through_every_change_of_tier_and_size(engine, solo):
    kinds = [GREEDY, DRAWN, STEERED, replace(GREEDY, max_tokens=30), STEERED, DRAWN]
    wanted = list(zip(PROMPTS, kinds, strict=True))
    long = replace(GREEDY, max_tokens=60)
    row, seen = engine.submit(PROMPTS[0], long, rounds=1), set()
    handles = []
    for turn in range(6 * PATIENCE):
        engine.step()
        seen.add(state_tier(engine))
        if turn % 5 == 0 and wanted:
            handles.append((engine.submit(*wanted[0], rounds=1), wanted.pop(0)))
        if row.finish_reason and turn < 3 * PATIENCE:
            check(row, PROMPTS[0], long, solo)
            row = engine.submit(PROMPTS[0], long, rounds=1)
    finish(engine)
    check(row, PROMPTS[0], long, solo)
    for handle, (prompt, params) in handles:
        check(handle, prompt, params, solo)
    assert {tier.batch for tier in seen} == {1, 2, 4}
    assert {tier.sampled for tier in seen} == {tier.controls for tier in seen} == {True, False}


def check(handle, prompt, params, solo):
    assert handle.result().token_ids == solo(prompt, params)


def test_a_batch_shrinks_when_rows_have_left_and_the_rest_moves_along(engine, solo):
    engine.warmup(GREEDY)
    short = [engine.submit(prompt, replace(GREEDY, max_tokens=2)) for prompt in PROMPTS[:3]]
    rows = [engine.submit(PROMPTS[3], replace(GREEDY, max_tokens=55), rounds=1)]
    sizes = []
    while engine.busy:
        engine.step()
        sizes.append(state_tier(engine).batch)
        if len(sizes) == 2 * PATIENCE:
            rows.append(engine.submit(PROMPTS[4], GREEDY, rounds=1))
    assert list(dict.fromkeys(sizes)) == [4, 1, 2]
    assert all(handle.finish_reason == "length" for handle in short)
    assert rows[0].token_ids == solo(PROMPTS[3], replace(GREEDY, max_tokens=55))
    assert rows[1].token_ids == solo(PROMPTS[4], GREEDY)


def test_nothing_is_compiled_because_a_request_leaves():
    small = Engine(CONFIG, PARAMS, max_batch=2, report=lambda _: None)
    row = small.submit(PROMPTS[0], replace(GREEDY, max_tokens=40), rounds=1)
    other = small.submit(PROMPTS[1], DRAWN, rounds=1)
    while not other.finish_reason:
        small.step()
    for _ in range(PATIENCE + 2):
        small.step()
    assert not row.finish_reason
    assert small._loop.programs.tiers == [Tier(2)]
    small.submit(PROMPTS[2], GREEDY, rounds=1)
    small.step()
    assert small._loop.programs.tiers == [Tier(2), Tier(2, sampled=False)]  # one has entered
    finish(small)


def test_cancelled_requests_leave_the_others_as_they_are(engine, solo):
    handles = [engine.submit(prompt, GREEDY, rounds=1) for prompt in PROMPTS]
    engine.step()
    waiting, running = handles[5], handles[1]
    engine.cancel(waiting)
    assert waiting.finish_reason == "cancelled"  # at once
    engine.step()
    engine.cancel(running)
    kept = list(running.token_ids)
    assert running in engine.step()
    assert 0 < len(kept) < 12
    finish(engine)
    assert running.result().token_ids == kept == solo(PROMPTS[1], GREEDY)[: len(kept)]
    assert waiting.result().token_ids == []
    for index in (0, 2, 3, 4):
        assert handles[index].token_ids == solo(PROMPTS[index], GREEDY)


def test_the_row_of_a_cancelled_request_rests(engine):
    engine.warmup(GREEDY, batches=[2])
    long = replace(GREEDY, max_tokens=50)
    gone, stays = (engine.submit(prompt, long, rounds=1) for prompt in PROMPTS[:2])
    engine.step()
    engine.cancel(gone)
    engine.step()
    state = engine._loop._state
    assert state.done.tolist() == [True, False]
    assert state.cached.tolist()[0] == 0 < state.cached.tolist()[1]
    engine.cancel(stays)
    finish(engine)


def test_a_request_that_cannot_fit_is_refused_at_once(engine):
    with pytest.raises(ValueError, match=r"60 tokens.*max_tokens 12.*72.*max_length 64"):
        engine.submit([1] * 60, GREEDY)
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        engine.submit([1], GREEDY, rounds=0)
    assert not engine.busy


def test_a_request_whose_text_fails_does_not_disturb_the_others(engine, solo):
    broken, sound = engine.submit(PROMPTS[0], GREEDY), engine.submit(PROMPTS[1], GREEDY)
    broken._text.push = lambda *_: 1 / 0
    finish(engine)
    assert broken.finish_reason == "error"
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert sound.result().token_ids == solo(PROMPTS[1], GREEDY)


def test_a_request_whose_programs_do_not_compile_fails_alone(engine, solo, monkeypatch):
    row = engine.submit(PROMPTS[0], GREEDY, rounds=1)
    engine.step()
    compile_missing = Programs.compile_missing

    def failing(self, tier):
        return 1 / 0 if tier.logprobs == 20 else compile_missing(self, tier)

    monkeypatch.setattr(Programs, "compile_missing", failing)
    late = engine.submit(PROMPTS[1], replace(GREEDY, logprobs=20))
    assert late in engine.step()
    assert late.finish_reason == "error"
    finish(engine)
    assert row.token_ids == solo(PROMPTS[0], GREEDY)


def test_an_error_of_the_device_ends_what_runs_and_what_waits_goes_on(engine, solo, monkeypatch):
    handles = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Programs, "run_rounds", lambda *_: 1 / 0)
        assert set(engine.step()) == set(handles[:4])
    finish(engine)
    for handle in handles[:4]:
        with pytest.raises(ZeroDivisionError):
            handle.result()
    for prompt, handle in zip(PROMPTS[4:], handles[4:], strict=True):
        assert handle.token_ids == solo(prompt, GREEDY)


def test_an_interrupt_ends_what_runs_and_goes_on_to_the_caller(engine, solo, monkeypatch):
    handle = engine.submit(PROMPTS[0], GREEDY)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "run_rounds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    with pytest.raises(RuntimeError, match="interrupted"):
        handle.result()
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == solo(PROMPTS[0], GREEDY)


def test_warmup_compiles_what_it_is_asked_for():
    small = Engine(CONFIG, PARAMS, max_batch=3, report=lambda _: None)
    with pytest.raises(ValueError, match="batch 4 is not within 1 and max_batch 3"):
        small.warmup(batches=[4])
    small.warmup(GREEDY, batches=[1, 3])
    assert small._loop.programs.tiers == [Tier(1, sampled=False), Tier(3, sampled=False)]
    small.submit(PROMPTS[0], GREEDY)
    small.step()
    with pytest.raises(RuntimeError, match="requests are running"):
        small.warmup()
    finish(small)
    assert len(small._loop.programs.tiers) == 2


async def read(engine, prompt, params, most=None):
    tokens, reasons = [], []
    chunks = engine.astream(prompt, params)
    async for chunk in chunks:
        tokens += chunk.token_ids
        reasons.append(chunk.finish_reason)
        if most and len(tokens) >= most:
            await chunks.aclose()
            return tokens
    assert set(reasons[:-1]) <= {None}
    assert reasons[-1] == "length"
    return tokens


def test_streams_of_asyncio_decode_together_and_leave_the_loop_free(engine, solo):
    ticks = []

    async def tick():
        while True:
            ticks.append(None)
            await asyncio.sleep(0)

    async def main():
        ticking = asyncio.ensure_future(tick())
        reads = [read(engine, p, k) for p, k in zip(PROMPTS, [GREEDY, DRAWN] * 3, strict=True)]
        left = read(engine, PROMPTS[2], GREEDY, most=2)
        outputs = await asyncio.gather(left, *reads)
        ticking.cancel()
        return outputs

    left, *outputs = asyncio.run(main())
    assert left == solo(PROMPTS[2], GREEDY)[: len(left)]
    for prompt, kind, tokens in zip(PROMPTS, [GREEDY, DRAWN] * 3, outputs, strict=True):
        assert tokens == solo(prompt, kind)
    assert len(ticks) > 20
    finish(engine)


def test_only_the_engine_that_has_a_request_cancels_it(engine, solo):
    other = Engine(CONFIG, PARAMS, max_batch=1)
    request = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="was not submitted to this engine"):
        other.cancel(request)
    finish(engine)
    assert request.result().token_ids == solo(PROMPTS[0], GREEDY)
    engine.cancel(request)  # it has ended, and stays
    assert request.finish_reason == "length"


def test_a_cancelled_task_cancels_its_request(engine):
    async def main():
        task = asyncio.ensure_future(read(engine, PROMPTS[0], replace(GREEDY, max_tokens=60)))
        for _ in range(3):
            await asyncio.sleep(0)
        assert engine.busy
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    engine.step()
    assert not engine.busy


def test_what_ended_but_holds_its_slot_is_in_nobodys_way(engine, solo):
    left = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:4]]
    engine.step()
    for request in left:
        engine.cancel(request)
    engine.warmup(GREEDY, batches=[1])
    with engine._loop.at_rest():
        assert engine._loop._state is None
    assert engine.generate([PROMPTS[3]], GREEDY)[0].token_ids == solo(PROMPTS[3], GREEDY)
    running = engine.submit(PROMPTS[0], GREEDY)
    engine.step()
    with pytest.raises(RuntimeError, match="requests are running"):
        engine.warmup(GREEDY, batches=[1])
    engine.cancel(running)
    finish(engine)


def test_a_request_is_served_once(engine, solo):
    (first, second) = engine.prepare(PROMPTS[:2], GREEDY)
    running = engine.serve([first])
    next(running)
    with pytest.raises(ValueError, match="a request is served once; prepare another"):
        list(engine.serve([second, first]))
    assert second.finish_reason == "cancelled"
    list(running)
    assert first.result().token_ids == solo(PROMPTS[0], GREEDY)
    with pytest.raises(ValueError, match="served once"):
        list(engine.serve([first]))


def test_errors_of_a_stream_come_at_the_call(engine):
    async def main():
        with pytest.raises(ValueError, match="is empty"):
            engine.astream([], GREEDY)

    asyncio.run(main())


def test_threads_share_the_loop(engine, solo):
    found = {}

    def generate(index):
        found[index] = engine.generate([PROMPTS[index]], GREEDY)[0].token_ids

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {index: solo(PROMPTS[index], GREEDY) for index in range(6)}
