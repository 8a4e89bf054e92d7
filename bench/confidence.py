"""How well the confidence head foretells acceptance: recording it, judging it, calibrating it.

As the published evaluator records it: the running product of a round's confidences against whether
the prefix up to there was accepted, for the positions that were proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from sklearn.metrics import brier_score_loss, roc_auc_score

from bench.records import Curves
from dspark_jax import decode
from dspark_jax.config import ModelConfig
from dspark_jax.request import SamplingParams
from dspark_jax.rows import prompt_chunks, row_settings
from dspark_jax.state import DecodeState, Params

BINS = 20  # of equal width, as in the published evaluator
DRAWN_BINS, LEAST_IN_BIN = 10, 20  # of a reliability diagram, and rounds that one needs
GRID = np.geomspace(0.125, 8.0, 193)  # temperatures that are tried at each position


@dataclass(frozen=True)
class Recorded:
    """One row a round: confidence logits, whether the prefix was accepted, what was proposed."""

    logits: Float[np.ndarray, "n P"]
    accepted: Bool[np.ndarray, "n P"]
    proposed: Bool[np.ndarray, "n P"]

    @property
    def positions(self) -> int:
        return self.logits.shape[1]

    def survival(self, temperatures: Sequence[float] | None = None) -> Float[np.ndarray, "n P"]:
        """Chance of each prefix as the head tells it."""
        scale = np.ones(self.positions) if temperatures is None else np.asarray(temperatures)
        return np.cumprod(_sigmoid(self.logits / scale[: self.positions]), axis=1)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def expected_calibration_error(told: np.ndarray, came: np.ndarray) -> float:
    """Mean distance of what was told and what came, over bins of equal width."""
    places = np.minimum((told * BINS).astype(int), BINS - 1)
    gaps = np.bincount(places, told - came, BINS)
    return float(np.abs(gaps).sum() / max(len(told), 1))


def fit_temperatures(recorded: Recorded) -> list[float]:
    """Sequential temperature scaling (DSpark paper): position by position, those before it kept,
    the temperature that leaves the running product the least calibration error."""
    before, found = np.ones(len(recorded.logits)), []
    for position in range(recorded.positions):
        valid = recorded.proposed[:, position]
        logits, came = recorded.logits[valid, position], recorded.accepted[valid, position]
        found.append(_best_temperature(before[valid], logits, came))
        before = before * _sigmoid(recorded.logits[:, position] / found[-1])
    return found


def _best_temperature(before: np.ndarray, logits: np.ndarray, came: np.ndarray) -> float:
    """Of the grid the one nearest to none, of those as good as the best but for noise.

    Where few prefixes are accepted the error says little: its least lies anywhere.
    """
    told = [before * _sigmoid(logits / temperature) for temperature in GRID]
    errors = np.array([expected_calibration_error(one, came) for one in told])
    noise = np.std(came) / np.sqrt(max(len(came), 1))  # of the share accepted
    good = GRID[errors <= errors.min() + noise / 2]
    return round(float(min(good, key=lambda temperature: abs(np.log(temperature)))), 4)


def judge(recorded: Recorded, temperatures: Sequence[float] | None) -> list[dict[str, Any]]:
    """ECE, AUC and Brier score of the running product at each position.

    An AUC is None where all prefixes were accepted, or none was.
    """
    told, rows = recorded.survival(temperatures), []
    for position in range(recorded.positions):
        valid = recorded.proposed[:, position]
        own, came = told[valid, position], recorded.accepted[valid, position]
        mixed = 0 < came.sum() < len(came)
        rows.append(
            {
                "position": position + 1,
                "rounds": int(valid.sum()),
                "accepted": float(came.mean()) if len(came) else None,
                "ece": expected_calibration_error(own, came),
                "auc": float(roc_auc_score(came, own)) if mixed else None,
                "brier": float(brier_score_loss(came, own)) if mixed else None,
            }
        )
    return rows


def reliability(recorded: Recorded, temperatures: Sequence[float]) -> Curves:
    """The diagram before and after: for each position, mean told and share accepted by bin."""
    panels: dict[str, Sequence[float] | None] = {"as trained": None, "calibrated": temperatures}
    return {title: _reliability(recorded, used) for title, used in panels.items()}


def _reliability(
    recorded: Recorded, temperatures: Sequence[float] | None
) -> list[list[tuple[float, float]]]:
    told, curves = recorded.survival(temperatures), []
    for position in range(recorded.positions):
        valid = recorded.proposed[:, position]
        own, came = told[valid, position], recorded.accepted[valid, position]
        places = np.minimum((own * DRAWN_BINS).astype(int), DRAWN_BINS - 1)
        bins = (places == place for place in range(DRAWN_BINS))
        curves.append(
            [(float(own[b].mean()), float(came[b].mean())) for b in bins if b.sum() >= LEAST_IN_BIN]
        )
    return curves


def mean_error(rows: Sequence[dict[str, Any]]) -> float:
    """Mean over positions of the ECE that `judge` found."""
    return float(np.mean([row["ece"] for row in rows]))


def record(
    config: ModelConfig,
    params: Params,
    prompts: Sequence[Sequence[int]],
    asked: Sequence[SamplingParams],
    stop_ids: Sequence[int],
    batch: int,
    advance: Callable[[int], None] = lambda count: None,
) -> Recorded:
    """Continue prompts, `batch` at a time, and record every round."""
    logits, counts = [], []
    for begin in range(0, len(prompts), batch):
        part = slice(begin, begin + batch)
        state = decode.init_state(config, batch)
        for slot, (prompt, one) in enumerate(zip(prompts[part], asked[part], strict=True)):
            row = row_settings(len(prompt), one, seed=one.seed or 0, stop_ids=stop_ids)
            state = decode.admit(config, state, np.int32(slot), row)
            for chunk in prompt_chunks(prompt, config.decode.prefill_chunk):
                state, _ = decode.prefill(config, params, state, np.int32(slot), *chunk)
        for told, counted in _rounds(config, params, state):
            ran = counted[:, 0] > 0
            logits.append(told[ran])
            counts.append(counted[ran])
        advance(len(prompts[part]))
    told, counted = np.concatenate(logits), np.concatenate(counts)
    places = np.arange(told.shape[1])
    return Recorded(told, places < counted[:, 1:2], places < counted[:, 2:3])


def _rounds(
    config: ModelConfig, params: Params, state: DecodeState
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    while not bool(jnp.all(state.done)):
        state, proposal = decode.draft_step(config, params, state)
        told = np.asarray(proposal.confidence, np.float64)
        state, output = decode.verify_step(config, params, state, proposal)
        yield told, np.asarray(output.counts)
