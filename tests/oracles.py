"""Slow, plain float64 numpy answers that the product is held against.

Nothing here imports the product or PyTorch. Laws are arrays that sum to one; texts and drafted
prefixes are tuples of ids.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int

Law = Float[np.ndarray, " V"]
TextLaw = Callable[[tuple[int, ...]], Law]  # of the token after a text
Outcomes = dict[tuple[int, ...], float]
RESIDUAL_FLOOR = 1e-8


# --- layers ---


def rms_norm(x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, " D"], eps: float):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def inverse_frequencies(rope: Any, head_dim: int) -> Float[np.ndarray, " H/2"]:
    """Radians a position, as transformers' `modeling_rope_utils` defines each kind.

    `rope` has the fields of transformers' `rope_parameters`, its type named `kind`.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        turns = np.array([rope.beta_fast, rope.beta_slow])
        edges = (
            head_dim
            * np.log(rope.original_max_position / (turns * 2 * np.pi))
            / (2 * np.log(rope.theta))
        )
        if rope.truncate:
            edges = np.array([np.floor(edges[0]), np.ceil(edges[1])])
        low, high = max(edges[0], 0), min(edges[1], head_dim - 1)
        high += 0.001 * (low == high)
        ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
        return plain / rope.factor * ramp + plain * (1 - ramp)
    if rope.kind == "llama3":
        turns = rope.original_max_position * plain / (2 * np.pi)
        share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        share = np.clip(share, 0, 1)
        return share * plain + (1 - share) * plain / rope.factor
    raise ValueError(f"unknown rope kind {rope.kind}")


def rotate(
    x: Float[np.ndarray, "T N H"], positions: Int[np.ndarray, " T"], rope: Any
) -> Float[np.ndarray, "T N H"]:
    """Turn each pair (i, i + H/2) of a head by position x inverse frequency."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None, None] * inverse_frequencies(rope, x.shape[-1])
    first, second = np.asarray(x[..., :half], np.float64), np.asarray(x[..., half:], np.float64)
    turned = np.exp(1j * angle) * (first + 1j * second) * rope.attention_factor
    return np.concatenate([turned.real, turned.imag], -1)


def attention(
    query: Float[np.ndarray, "T N H"],
    key: Float[np.ndarray, "S K H"],
    value: Float[np.ndarray, "S K H"],
    visible: Bool[np.ndarray, "T S"],
) -> Float[np.ndarray, "T N H"]:
    """Softmax attention, one loop a head; query head n reads key head n // (N / K)."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    out = np.zeros_like(query)
    for n in range(query.shape[1]):
        scores = query[:, n] @ key[:, n // group].T * query.shape[-1] ** -0.5
        out[:, n] = softmax(np.where(visible, scores, -np.inf)) @ value[:, n // group]
    return out


# --- sampling laws ---


def softmax(logits: Float[np.ndarray, "... V"]) -> Float[np.ndarray, "... V"]:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sampling_law(
    logits: Float[np.ndarray, " V"],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Law:
    """Temperature, top-k, top-p, min-p in transformers' order; below 1e-5 the argmax."""
    logits = np.asarray(logits, np.float64)
    if temperature < 1e-5:
        return np.eye(len(logits))[logits.argmax()]
    scores = logits / temperature
    if top_k:
        kth = np.sort(scores)[-min(top_k, len(scores))]
        scores = np.where(scores < kth, -np.inf, scores)
    if top_p < 1.0:
        order = np.argsort(scores, kind="stable")
        drop = softmax(scores)[order].cumsum() <= 1 - top_p
        drop[-1] = False
        scores[order[drop]] = -np.inf
    law = softmax(scores)
    if min_p:
        law = np.where(law < min_p * law.max(), 0, law)
    return law / law.sum()


# --- verification rules ---


class Rule(Protocol):
    """How a proposal is judged."""

    def __call__(
        self, drafts: Sequence[int], draft_laws: Sequence[Law], target_laws: Sequence[Law]
    ) -> tuple[Float[np.ndarray, " P+1"], list[Law]]:
        """Return P(accepted = n) and the law of the token after n accepted, n = 0..P.

        The k-th laws are those at the k-th position given the drafts before it; there is one
        more target law than there are drafts.
        """
        ...


def residual(target_law: Law, draft_law: Law, scale: float = 1.0) -> Law:
    """max(scale * target - draft, 0) normed; the target's law where no mass is left."""
    rest = np.maximum(scale * target_law - draft_law, 0)
    return rest / rest.sum() if rest.sum() > RESIDUAL_FLOOR else target_law


def judge_tokens(drafts, draft_laws, target_laws):
    """Token-wise rejection: accept while a coin is below target / draft."""
    count = len(drafts)
    lengths, follow, reached = np.zeros(count + 1), [], 1.0
    for k, token in enumerate(drafts):
        pass_chance = min(1.0, target_laws[k][token] / max(draft_laws[k][token], 1e-300))
        lengths[k] = reached * (1 - pass_chance)
        reached *= pass_chance
        follow.append(residual(target_laws[k], draft_laws[k]))
    lengths[count] = reached
    return lengths, [*follow, target_laws[count]]


def judge_block(drafts, draft_laws, target_laws):
    """Block verification (Sun et al. 2024): the largest i whose coin is below h_i."""
    count = len(drafts)
    prefix = [1.0]  # p_i
    for k, token in enumerate(drafts):
        prefix.append(min(prefix[-1] * target_laws[k][token] / draft_laws[k][token], 1.0))
    chances = []  # h_1 .. h_P
    for i in range(1, count + 1):
        if i == count:
            chances.append(prefix[i])
            continue
        mass = np.maximum(prefix[i] * target_laws[i] - draft_laws[i], 0).sum()
        rest = mass + 1 - prefix[i]
        chances.append(1.0 if rest == 0 else mass / rest)
    lengths, above = np.zeros(count + 1), 1.0
    for i in range(count, 0, -1):
        lengths[i] = above * chances[i - 1]
        above *= 1 - chances[i - 1]
    lengths[0] = above
    follow = [residual(target_laws[i], draft_laws[i], prefix[i]) for i in range(count)]
    return lengths, [*follow, target_laws[count]]


def gumbel_joint(draft_law: Law, target_law: Law) -> Float[np.ndarray, "V V"]:
    """P(draft draws a, target draws b) when both add the same Gumbel noise and take the argmax.

    With exponential clocks E_v the draft draws argmin E_v / draft_v and the target argmin
    E_v / target_v; for a != b the ratio s = E_b / E_a is integrated piece by piece.
    """
    size = len(draft_law)
    joint = np.zeros((size, size))
    for a, b in itertools.product(range(size), repeat=2):
        if draft_law[a] <= 0 or target_law[b] <= 0:
            continue
        reach, slope = draft_law / draft_law[a], target_law / target_law[b]
        if a == b:
            joint[a, b] = 1 / np.maximum(reach, slope).sum()
            continue
        low = reach[b]
        high = 1 / slope[a] if slope[a] > 0 else np.inf
        if high <= low:
            continue
        others = [v for v in range(size) if v not in (a, b)]
        kinks = [reach[v] / slope[v] for v in others if slope[v] > 0]
        edges = [low, *sorted(s for s in kinks if low < s < high), high]

        def rate(s: float, reach=reach, slope=slope, others=others) -> float:
            return 1 + s + sum(max(reach[v], s * slope[v]) for v in others)

        for s, t in itertools.pairwise(edges):
            if np.isinf(t):
                joint[a, b] += 1 / (rate(s) * (1 + slope[others].sum()))
            else:
                joint[a, b] += (t - s) / (rate(s) * rate(t))
    return joint


# --- enumeration of what a round emits ---


def round_outcomes(rule: Rule, draft_laws: TextLaw, target_laws: TextLaw, block: int) -> Outcomes:
    """Law of what one round emits: accepted drafts and the token after them.

    Both laws take the drafted prefix of the round.
    """
    outcomes: Outcomes = defaultdict(float)
    for drafts in itertools.product(range(len(target_laws(()))), repeat=block):
        rows = [draft_laws(drafts[:k]) for k in range(block)]
        weight = np.prod([row[token] for row, token in zip(rows, drafts, strict=True)])
        if weight == 0:
            continue
        targets = [target_laws(drafts[:k]) for k in range(block + 1)]
        lengths, follow = rule(drafts, rows, targets)
        for n in range(block + 1):
            for token, chance in enumerate(follow[n]):
                if lengths[n] * chance > 0:
                    outcomes[(*drafts[:n], token)] += weight * lengths[n] * chance
    return outcomes


def gumbel_outcomes(draft_laws: TextLaw, target_laws: TextLaw, block: int) -> Outcomes:
    """The same for shared-noise verification; noise at different positions is independent."""
    outcomes: Outcomes = defaultdict(float)
    open_prefixes: Outcomes = {(): 1.0}
    for _ in range(block):
        longer: Outcomes = {}
        for prefix, weight in open_prefixes.items():
            joint = gumbel_joint(draft_laws(prefix), target_laws(prefix))
            for a, b in itertools.product(range(len(joint)), repeat=2):
                (longer if a == b else outcomes).setdefault((*prefix, b), 0.0)
                (longer if a == b else outcomes)[(*prefix, b)] += weight * joint[a, b]
        open_prefixes = longer
    for prefix, weight in open_prefixes.items():
        for token, chance in enumerate(target_laws(prefix)):
            outcomes[(*prefix, token)] += weight * chance
    return outcomes


def emitted_law(
    one_round: Callable[[tuple[int, ...]], Outcomes], vocab: int, length: int
) -> Float[np.ndarray, "... V"]:
    """Joint law [V, ..., V] of the first `length` tokens over as many rounds as that takes.

    `one_round` gives the outcomes of a round that starts after a text.
    """
    law = np.zeros((vocab,) * length)
    waiting: Outcomes = {(): 1.0}
    while waiting:
        later: Outcomes = defaultdict(float)
        for text, weight in waiting.items():
            for emitted, chance in one_round(text).items():
                longer = text + emitted
                if len(longer) >= length:
                    law[longer[:length]] += weight * chance
                else:
                    later[longer] += weight * chance
        waiting = later
    return law


def text_law(target_laws: TextLaw, vocab: int, length: int) -> Float[np.ndarray, "... V"]:
    """Joint law of `length` tokens drawn one at a time."""
    law = np.zeros((vocab,) * length)
    for text in itertools.product(range(vocab), repeat=length):
        law[text] = np.prod([target_laws(text[:k])[token] for k, token in enumerate(text)])
    return law


# --- statistics ---


def clustered_ratio(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, float]:
    """Ratio of sums over runs and its standard error, runs taken as the independent unit."""
    top, bottom = np.asarray(numerators, float), np.asarray(denominators, float)
    ratio = top.sum() / bottom.sum()
    spread = ((top - ratio * bottom) ** 2).sum() * len(top) / (len(top) - 1)
    return float(ratio), float(np.sqrt(spread) / bottom.sum())


def algorithm_1(
    alive: np.ndarray, active: np.ndarray, curve: np.ndarray, tiers: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """Lengths by the paper's loop with its early stop, then the tier filled; and the tier."""
    items = [
        (-float(a), r, j) for r in np.flatnonzero(active) for j, a in enumerate(alive[r], start=1)
    ]
    items.sort()
    tokens = expected = int(active.sum())
    best, chosen = expected / float(curve[tokens]), 0
    total = np.float32(0)
    for negative, _, _ in items:
        total += np.float32(-negative)
        rate = np.float32(expected + total) / np.float32(curve[tokens + 1])
        tokens += 1
        if rate <= np.float32(best):
            break
        best, chosen = rate, chosen + 1
    running = int(active.sum())
    size = next(tier for tier in tiers if tier >= running + chosen)
    lengths = np.zeros(len(alive), int)
    for _, r, j in items[: size - running]:
        lengths[r] = j
    return lengths, size
