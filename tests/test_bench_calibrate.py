"""bench calibrate: what temperatures are fitted, how they are judged, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench import confidence
from bench.__main__ import main
from bench.calibrate import build_parser, choose_halves
from bench.confidence import Recorded, expected_calibration_error, fit_temperatures, judge
from dspark_jax import load
from dspark_jax.calibration import read_calibration
from tests import tiny

EVAL = Path(__file__).parent / "eval"

WRONG = np.array([0.5, 2.0, 1.0])  # what the head multiplied its logits by


def rounds(count: int, seed: int) -> Recorded:
    """Rounds whose true logits are known; the head tells them scaled by position."""
    rng = np.random.default_rng(seed)
    true = rng.normal(1.0, 1.0, (count, len(WRONG)))
    passed = rng.random(true.shape) < 1 / (1 + np.exp(-true))
    accepted = np.cumprod(passed, axis=1).astype(bool)
    return Recorded(true * WRONG, accepted, np.ones_like(accepted))


def test_the_temperatures_that_were_wrong_are_found():
    fit, held_out = rounds(60_000, 0), rounds(60_000, 1)
    found = fit_temperatures(fit)
    np.testing.assert_allclose(found, WRONG, rtol=0.15)
    before, after = judge(held_out, None), judge(held_out, found)
    for position in range(2):
        assert before[position]["ece"] > 0.025
        assert after[position]["ece"] < 0.012
        assert after[position]["brier"] < before[position]["brier"]
    assert before[0]["auc"] == pytest.approx(after[0]["auc"])  # order-preserving by position
    assert confidence.mean_error(after) < confidence.mean_error(before) / 3


def test_where_the_error_says_little_the_temperature_stays_near_none():
    """Few prefixes are accepted, and told as they are: what noise prefers is not fitted."""
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = rng.normal([-4.0, 1.0], 1.0, (4_000, 2))
        passed = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
        accepted = np.cumprod(passed, axis=1).astype(bool)
        found.append(fit_temperatures(Recorded(logits, accepted, np.ones_like(accepted)))[1])
    assert np.abs(np.log(found)).mean() < 0.3


def test_the_calibration_error_is_that_of_its_definition():
    rng = np.random.default_rng(0)
    told, came = rng.random(500), rng.random(500) < 0.4
    total = 0.0
    for bin_ in range(20):
        inside = (told * 20).astype(int) == bin_
        if inside.any():
            total += inside.sum() * abs(told[inside].mean() - came[inside].mean())
    assert expected_calibration_error(told, came) == pytest.approx(total / 500)
    assert expected_calibration_error(np.ones(3), np.ones(3, bool)) == 0


def test_positions_that_were_not_proposed_do_not_count():
    whole = rounds(4_000, 2)
    proposed = np.arange(3) < np.random.default_rng(0).integers(1, 4, (4_000, 1))
    cut = Recorded(whole.logits, whole.accepted & proposed, proposed)
    found = judge(cut, None)
    assert [row["rounds"] for row in found] == proposed.sum(0).tolist()
    own = proposed[:, 2]
    again = judge(Recorded(whole.logits[own], whole.accepted[own], proposed[own]), None)
    assert found[2] == again[2]


def test_recorded_rounds_are_those_of_the_engine():
    config = tiny.tiny_config(max_length=64, prefill_chunk=8)
    params = tiny.random_params(config)
    requests = [tiny.Request([1, 2, 3], 12), tiny.Request([4] * 10, 9, temperature=1.0, seed=2)]
    found = []
    asked = [
        confidence.SamplingParams(max_tokens=r.max_tokens, temperature=r.temperature, seed=r.seed)
        for r in requests
    ]
    with tiny.quick_compilation():
        prompts = [r.prompt for r in requests]
        recorded = confidence.record(config, params, prompts, asked, (), 2)
        found, _ = tiny.run(config, params, requests)
    lengths = [n - 1 for one in found for n in one.acceptance_lengths]
    assert len(recorded.logits) == len(lengths)
    assert sorted(recorded.accepted.sum(1)) == sorted(lengths)
    assert (recorded.proposed.sum(1) == config.decode.num_drafts).all()
    assert recorded.logits.std() > 0


def test_the_command_fits_judges_and_saves(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    out, chart = tmp_path / "calibration.json", tmp_path / "diagram.svg"
    arguments = ["--num-prompts", "8", "--output-len", "24", "--max-length", "240"]
    assert main(["calibrate", *arguments, "--out", str(out), "--chart", str(chart)]) == 0
    text = capsys.readouterr().out
    assert "ECE %" in text
    assert "mean over positions: ECE" in text
    assert chart.read_text().startswith("<?xml")
    tree = json.loads(out.read_text())
    assert len(tree["temperatures"]) == len(tree["before"]) == len(tree["after"]) == 7
    engine = load(
        max_length=240, max_batch=1, calibration=out, confidence_threshold=0.5
    )  # where they act
    assert engine.config.decode.temperatures == read_calibration(out, engine.config)
    assert engine.config.decode.temperatures == tuple(tree["temperatures"])
    report = tmp_path / "report.html"
    arguments = ["--dataset", str(EVAL / "mbpp.jsonl"), "--num-prompts", "1", "--output-len", "8"]
    arguments += ["--confidence-threshold", "0.5", "--calibration", str(out), "--drop-long"]
    assert main(["speed", *arguments, "--html", str(report)]) == 0
    assert "Reliability of the confidence head" in report.read_text()


def test_prompts_of_its_own_are_many_and_no_file_is_on_both_sides():
    fit, held_out = choose_halves(build_parser().parse_args(["--num-prompts", "100000"]))
    assert min(len(fit), len(held_out)) > 250
    heads = ("def ", "class ")
    assert all(one.turns[0].lstrip().startswith(heads) for one in (*fit, *held_out))
    files = [{one.question_id.rsplit(":", 1)[0] for one in half} for half in (fit, held_out)]
    assert not files[0] & files[1]


def test_prompts_of_a_file_are_halved(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(9)))
    fit, held_out = choose_halves(build_parser().parse_args(["--dataset", str(path)]))
    assert (len(fit), len(held_out)) == (5, 4)
    assert not {one.turns for one in fit} & {one.turns for one in held_out}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--draft", "ngram"), "has no confidence head"),
        (("--draft", "none"), "has no confidence head"),
        (("--num-prompts", 1), "two prompts are the least"),
        (("--out", "/no/such/file"), "its folder does not exist"),
        (("--out", "/"), "--out / is a folder; name a file"),
        (("--chart", "x.jpg"), "name a file that ends in .svg or .png"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, capsys):
    assert main(["calibrate", "--max-length", "64", *map(str, arguments)]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("bench calibrate")]
    assert words in line
