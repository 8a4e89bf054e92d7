"""Possible against realised acceptance: the statistics on made rounds, then on true engines."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench import ceiling as verdicts
from bench.ceiling import ceiling
from bench.datasets import Conversation
from bench.pairs import variant
from bench.records import Record
from bench.replay import Replay
from bench.serving import Generation, answer
from dspark_jax import drafters, verify
from dspark_jax.loading import EMBEDDED, load

REFERENCE = json.loads((Path(__file__).parent / "demo" / "reference.json").read_text())
PROMPTS = list(dict.fromkeys(case["prompt"] for case in REFERENCE["greedy"]))
CONVERSATIONS = [Conversation(str(i), (text,)) for i, text in enumerate(PROMPTS)]
DRAWN = Generation(output_len=64, temperature=1.0, rounds_per_call=16)


def made(name, rounds, *, requests=8):
    """A record for each request of (possible at each position, accepted) rounds."""
    return [
        Record(
            question_id=name,
            turn=0,
            prompt_tokens=1,
            output_tokens=1,
            finish_reason="length",
            seed=0,
            batch=0,
            arrivals=[[1.0, 1]],
            acceptance_lengths=[accepted + 1 for _, accepted in part],
            proposal_lengths=[len(possible) for possible, _ in part],
            accepted_drafts=[accepted for _, accepted in part],
            possible_acceptance=[possible for possible, _ in part],
        )
        for name, part in ((f"{name} {i}", rounds[i::requests]) for i in range(requests))
    ]


def drawn_rounds(seed, count, factor=1.0):
    """Rounds of three drafts, accepted with `factor` times what was possible."""
    source = random.Random(seed)
    rounds = []
    for _ in range(count):
        possible = [source.uniform(0.3, 1.0) for _ in range(3)]
        accepted = next((k for k in range(3) if source.random() >= factor * possible[k]), 3)
        rounds.append((possible, accepted))
    return rounds


def test_fair_coins_are_no_fault_and_short_ones_are():
    for seed in range(20):
        found = ceiling(made("fair", drawn_rounds(seed, 400)), 1.0)
        assert found["verdict"] == verdicts.FITS
        assert [row["position"] for row in found["in_round"]] == [1, 2, 3]
    found = ceiling(made("short", drawn_rounds(0, 400, factor=0.8)), 1.0)
    assert found["verdict"].startswith("engine fault (verification): position 1 allows 0.6")
    row = found["in_round"][0]
    assert row["realised"] < row["possible"]
    assert row["errors_apart"] < -3


def test_means_and_error_by_hand():
    rounds = [([0.5, 0.8], 2), ([0.5, 0.8], 0), ([0.7], 1), ([0.9, 0.2], 1)]
    found = ceiling(made("hand", rounds, requests=2), 1.0)
    first, second = found["in_round"]
    assert (first["rounds"], second["rounds"]) == (4, 2)
    assert first["possible"] == pytest.approx(0.65)
    assert first["realised"] == 0.75
    variance = 0.25 + 0.25 + 0.21 + 0.09 + 1  # of the coins, and a round's worth
    assert first["standard_error"] == pytest.approx(variance**0.5 / 4)
    assert first["errors_apart"] == pytest.approx(0.1 / (variance**0.5 / 4))
    assert (second["possible"], second["realised"]) == (pytest.approx(0.5), 0.5)
    assert found["possible_length"] == pytest.approx(1 + (4 * 0.65 + 2 * 0.5) / 4)


def test_rounds_of_one_request_are_not_independent():
    rounds = [([0.5], i % 2) for i in range(400)]
    spread = made("many", rounds, requests=100)
    grouped = [replace(one, question_id=str(i % 2)) for i, one in enumerate(spread)]
    alone = ceiling(spread, 1.0)["in_round"][0]["standard_error"]
    together = ceiling(grouped, 1.0)["in_round"][0]["standard_error"]
    assert together > 3 * alone


def test_what_is_not_tested_says_so():
    assert ceiling(made("greedy", drawn_rounds(0, 400)), 0.0)["verdict"] == verdicts.GREEDY
    assert ceiling(made("few", drawn_rounds(0, 20)), 1.0)["verdict"] == verdicts.FEW
    bare = [replace(one, possible_acceptance=None) for one in made("x", drawn_rounds(0, 50))]
    assert ceiling(bare, 1.0)["verdict"] == verdicts.UNKNOWN


def test_one_rejection_among_near_certain_drafts_is_no_fault():
    rounds = [([0.9999], 1)] * 40 + [([0.9999], 0)]
    assert ceiling(made("sure", rounds), 1.0)["verdict"] == verdicts.FITS
    rounds = [([0.9999], 1)] * 40 + [([0.9999], 0)] * 8
    assert ceiling(made("sure", rounds), 1.0)["verdict"].startswith("engine fault")


def test_a_draft_that_does_not_fit_is_no_fault():
    source = random.Random(1)
    rounds = [([0.1], int(source.random() < 0.1)) for _ in range(400)]
    assert ceiling(made("low", rounds), 1.0)["verdict"] == (
        "this draft does not fit this target: its first position allows 0.100"
    )
    assert ceiling(made("low", rounds), 1.0, trained=False)["verdict"] == verdicts.FITS


def engine_with(taps=None, **options):
    places = EMBEDDED / "target", EMBEDDED / "draft"
    return load(*places, target_layer_ids=taps, report=lambda line: None, **options)


def held(engine, replayed):
    """What the ceiling of an engine says over the reference's prompts, drawn at temperature 1."""
    records, _ = answer(
        variant(engine, ceiling=True),
        CONVERSATIONS,
        DRAWN,
        concurrency=8,
        repeat=Replay(engine, replayed) if replayed else None,
    )
    return ceiling(records, DRAWN.temperature)


def test_the_embedded_pair_realises_its_ceiling_and_shifted_taps_lower_it():
    found = held(engine_with(max_length=160), replayed=16)
    assert found["verdict"] == verdicts.FITS
    for rows in (found["in_round"], found["clean"]):
        assert rows[0]["rounds"] > 40
        assert all(abs(row["errors_apart"]) < 3 for row in rows)
    shifted = held(engine_with(taps=(1, 3, 4), max_length=160), replayed=0)
    assert "fault" not in shifted["verdict"]
    assert shifted["possible_length"] < found["possible_length"] - 0.1


def test_context_rows_written_late_are_an_engine_fault(monkeypatch):
    true_absorb = drafters.DSPARK.absorb

    def absorb_late(config, params, own, rows, start, count):
        late = rows.tokens.shape[1] == config.decode.step_rows  # a round's rows, not a prompt's
        return true_absorb(config, params, own, rows, start + 1 if late else start, count)

    monkeypatch.setattr(drafters, "DSPARK", replace(drafters.DSPARK, absorb=absorb_late))
    # a length of its own: no trace is shared with a true engine
    found = held(engine_with(max_length=161), replayed=24)
    assert found["verdict"].startswith("engine fault (draft's context): position 1")
    assert "verification" not in found["verdict"]


def test_a_verification_that_rejects_too_much_is_an_engine_fault(monkeypatch):
    true = verify.token_thresholds
    monkeypatch.setattr(verify, "token_thresholds", lambda *args: 0.6 * true(*args))
    found = held(engine_with(max_length=162), replayed=0)
    assert found["verdict"].startswith("engine fault (verification): position 1")
