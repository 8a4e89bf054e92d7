"""bench schedule: acceptance as it is told, costs tier by tier, and what comes out of both."""

import json

import numpy as np
import pytest

from bench import schedule
from bench.__main__ import main
from bench.modes import MODES, Bench, compile_programs
from bench.synthetic import CURVES, Curve
from dspark_jax.schedule import init_gains
from dspark_jax.state import MAX_ROUNDS
from dspark_jax.tiers import BatchCosts
from tests import tiny

BATCH, DRAFTS = 4, 4


@pytest.fixture(scope="module")
def pair():
    config = tiny.tiny_config(max_length=400, prefill_chunk=1, sampled=False)
    return config, tiny.random_params(config)


COSTS = BatchCosts(BATCH, 1.0, (10, 15, 20), (1.2, 1.6, 2.0))
STEEP = BatchCosts(BATCH, 1.0, COSTS.tokens, (1.2, 3.6, 6.0))


def compiled(pair, mode: str, costs: BatchCosts = COSTS) -> Bench:
    with tiny.quick_compilation():
        return Bench(compile_programs(*pair, costs, [mode])[mode], BATCH, 20)


def test_fixed_rounds_accept_as_the_curve_says(pair):
    curve = Curve(0.8, 0.8, others=(0.3, 0.3))
    _, counts = compiled(pair, "fixed").run(curve, 8)
    assert counts.shape == (8, BATCH, MAX_ROUNDS, 4)
    assert (counts[..., 2] == DRAFTS).all()
    for first, chance in ((0, 0.8), (1, 0.3)):
        emitted = counts[:, first::2, :, 0]
        expected = sum(chance**k for k in range(DRAFTS + 1))
        assert abs(emitted.mean() - expected) < 5 * emitted.std() / np.sqrt(emitted.size)


def test_scheduled_rounds_verify_what_is_likely(pair):
    curve = Curve(0.9, 0.9, others=(0.1, 0.1))
    _, counts = compiled(pair, "scheduled", STEEP).run(curve, 2, init_gains(BATCH))
    proposed = counts[..., 2]
    assert proposed[:, 0::2].mean() > 2 * proposed[:, 1::2].mean()
    assert set(proposed.sum(1).ravel() + BATCH) <= {BATCH, *COSTS.tokens}


def test_scheduled_rounds_draft_where_that_pays(pair):
    bench = compiled(pair, "scheduled")
    bench.run(CURVES["hopeless"], 6, init_gains(BATCH))
    _, counts = bench.run(CURVES["hopeless"], 4)
    assert (counts[..., 2].sum(1) == 0).mean() > 0.9
    _, counts = bench.run(CURVES["excellent"], 2, init_gains(BATCH))
    assert (counts[..., 2] == DRAFTS).all()


def test_a_run_leaves_a_line_for_every_mode_and_curve(pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "pair", lambda *_, **__: pair)
    out = tmp_path / "schedule.jsonl"
    arguments = ["--batch", "2", "--cached", "20", "--calls", "1", "--out", str(out)]
    with tiny.quick_compilation():
        assert main(["schedule", "--curve", "poor", "good", *arguments]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["mode"], line["curve"]) for line in lines} == {
        (mode, curve) for mode in MODES for curve in ("poor", "good")
    }
    rates = {(line["mode"], line["curve"]): line["tokens_per_second"] for line in lines}
    for line in lines:
        if line["mode"] == "scheduled":
            best = max(rates["none", line["curve"]], rates["fixed", line["curve"]])
            assert line["of_best"] == pytest.approx(line["tokens_per_second"] / best, abs=1e-4)
            assert list(line["tiers_us"]) == ["5", "8", "10"]
            assert min(line["plain_us"], *line["tiers_us"].values()) > 0
    assert "of the" in capsys.readouterr().out
    assert main(["schedule", "--batch", "0"]) == 2
    assert "must be positive" in capsys.readouterr().err
    assert main(["schedule", "--out", str(tmp_path / "no" / "file")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
