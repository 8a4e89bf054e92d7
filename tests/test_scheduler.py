"""Order, slots, chunks and rounds, without a model: rows are played by hand."""

import pytest

from dspark_jax.accounting import Request
from dspark_jax.request import SamplingParams
from dspark_jax.scheduler import (
    BUSY_ROUNDS,
    PATIENCE,
    PREFILL_CHUNKS,
    Scheduler,
    batch_tier,
)
from dspark_jax.text import TextStream


def request(prompt=3, patience=16):
    made = Request([1] * prompt, SamplingParams(max_tokens=4), 0, (), TextStream(None))
    made.patience = patience
    return made


def settle(scheduler, batch=None):
    """Sweep, take the batch that the scheduler chooses (or another) and fill it."""
    scheduler.sweep()
    batch = batch or scheduler.choose_batch(lambda size: True)
    if batch != len(scheduler.slots):
        scheduler.resize(batch)
    return scheduler.enter()


def prefill(scheduler, size=8):
    """Run all prompts to their end; returns the chunks as (slot, tokens, last)."""
    chunks = iter(lambda: scheduler.next_chunk(size), None)
    return [(chunk.slot, len(chunk.token_ids), chunk.last) for chunk in chunks]


def filled(count, max_batch=8, **options):
    """A scheduler with `count` running requests."""
    scheduler, requests = Scheduler(max_batch), [request(**options) for _ in range(count)]
    for made in requests:
        scheduler.submit(made)
    settle(scheduler)
    prefill(scheduler)
    return scheduler, requests


def test_slots_are_given_in_order_of_arrival():
    scheduler, requests = Scheduler(2), [request() for _ in range(5)]
    assert not scheduler.busy
    for made in requests:
        scheduler.submit(made)
    assert scheduler.busy
    assert settle(scheduler) == [(0, requests[0]), (1, requests[1])]
    assert scheduler.running() == []  # no prompt has run
    assert prefill(scheduler) == [(0, 3, True), (1, 3, True)]
    assert scheduler.running() == [(0, requests[0]), (1, requests[1])]
    requests[1].cancel()
    assert scheduler.running() == [(0, requests[0])]  # at once
    assert settle(scheduler) == [(1, requests[2])]
    assert scheduler.vacated == set()  # its slot has been given anew
    requests[0].cancel()
    requests[3].cancel()  # while it waits
    assert settle(scheduler) == [(0, requests[4])]
    for made in requests:
        made.cancel()
    scheduler.sweep()
    assert not scheduler.busy
    assert scheduler.vacated == {0, 1}


def test_what_was_cut_short_is_told_by_the_sweep():
    scheduler, (ended, cancelled, failed, running) = filled(4)
    waiting = request()
    scheduler.submit(waiting)
    ended.take_first(1)
    ended.take_round([1, 1, 1], accepted=2, proposed=3, done=True)
    for made in (cancelled, waiting):
        made.cancel()
    failed.fail(ValueError("x"))
    assert scheduler.sweep() == [cancelled, failed, waiting]
    assert scheduler.slots == [None, None, None, running]
    assert scheduler.sweep() == []


def test_prompts_run_in_chunks_one_after_the_other():
    scheduler = Scheduler(4)
    for size in (9, 3, 4):
        scheduler.submit(request(prompt=size))
    settle(scheduler)
    assert prefill(scheduler, size=4) == [
        *((0, 4, False), (0, 4, False), (0, 1, True)),
        (1, 3, True),
        (2, 4, True),
    ]


def test_a_prompt_that_is_cancelled_runs_no_further():
    scheduler = Scheduler(2)
    long, short = request(prompt=9), request()
    scheduler.submit(long)
    scheduler.submit(short)
    settle(scheduler)
    scheduler.next_chunk(4)
    long.cancel()
    scheduler.sweep()
    assert prefill(scheduler, size=4) == [(1, 3, True)]


def test_running_rows_wait_for_a_few_chunks_only():
    scheduler = Scheduler(16)
    for _ in range(12):
        scheduler.submit(request())
    settle(scheduler)
    assert scheduler.chunks_allowed() == 16  # nothing runs: all prompts may
    scheduler.next_chunk(8)
    assert scheduler.chunks_allowed() == PREFILL_CHUNKS


def test_the_least_patient_request_sets_the_rounds_and_who_waits_shortens_them():
    scheduler, (first, _) = filled(2, max_batch=2)
    assert scheduler.rounds() == 16
    first.patience = 4
    assert scheduler.rounds() == 4
    late = request(prompt=9, patience=3)
    scheduler.submit(late)
    scheduler.sweep()
    assert scheduler.rounds() == BUSY_ROUNDS  # it waits for a slot
    first.cancel()
    settle(scheduler)
    scheduler.next_chunk(8)
    assert scheduler.rounds() == BUSY_ROUNDS  # and now for its prompt
    scheduler.next_chunk(8)
    assert scheduler.rounds() == 3


def test_a_batch_grows_at_once_and_rows_keep_their_order():
    scheduler, (first, second) = filled(2)
    assert len(scheduler.slots) == 2
    for _ in range(2):
        scheduler.submit(request())
    first.cancel()
    scheduler.sweep()
    assert scheduler.entering(4) == list(scheduler._waiting)
    assert scheduler.choose_batch(lambda size: True) == 4
    assert scheduler.resize(4) == [1, 0, 0, 0]
    assert scheduler.slots[0] is second
    assert scheduler.vacated == {1, 2, 3}
    assert [slot for slot, _ in scheduler.enter()] == [1, 2]
    assert scheduler.vacated == {3}


def test_a_batch_shrinks_after_a_while_and_only_to_what_can_run():
    scheduler, requests = filled(8)
    for made in requests[:6]:
        made.cancel()
    scheduler.sweep()
    calls = [scheduler.choose_batch(lambda size: True) for _ in range(PATIENCE + 1)]
    assert calls == [8] * PATIENCE + [2]
    assert {scheduler.choose_batch(lambda size: False) for _ in range(3 * PATIENCE)} == {8}
    scheduler.choose_batch(lambda size: True)
    for _ in range(3):
        scheduler.submit(request())
    scheduler.sweep()
    assert scheduler.choose_batch(lambda size: True) == 8  # and counts anew
    assert scheduler.resize(2) == [6, 7]
    assert scheduler.slots == requests[6:]


def test_calls_that_fewer_slots_would_have_served_count_in_a_row():
    scheduler, requests = filled(8)

    def calls(count=PATIENCE + 1):
        return [scheduler.choose_batch(lambda size: True) for _ in range(count)]

    def leave(gone):
        for made in gone:
            made.cancel()
        scheduler.sweep()

    assert calls(PATIENCE - 1) == [8] * (PATIENCE - 1)  # all of its slots are used
    leave(requests[4:])
    assert calls() == [8] * PATIENCE + [4]
    assert calls(PATIENCE - 1) == [8] * (PATIENCE - 1)
    late = [request() for _ in range(4)]
    for made in late:
        scheduler.submit(made)
    scheduler.sweep()
    assert calls(1) == [8]
    leave(late)
    assert calls() == [8] * PATIENCE + [4]
    scheduler.resize(4)
    leave(requests[2:4])
    assert calls() == [4] * PATIENCE + [2]


def test_an_idle_batch_takes_the_size_that_is_asked_for():
    scheduler, requests = filled(8)
    for made in requests:
        made.cancel()
    scheduler.submit(request())
    scheduler.sweep()
    assert scheduler.choose_batch(lambda size: False) == 1


@pytest.mark.parametrize(
    ("requests", "max_batch", "rows"),
    [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 8, 8), (8, 8, 8), (5, 6, 6), (1, 1, 1), (3, 3, 3)],
)
def test_batch_tier(requests, max_batch, rows):
    assert batch_tier(requests, max_batch) == rows


@pytest.mark.parametrize(("requests", "rows"), [(1, 4), (4, 4), (5, 8), (12, 12)])
def test_a_batch_in_parts_of_one_size_holds_every_request(requests, rows):
    assert batch_tier(requests, 12, parts=4) == rows
