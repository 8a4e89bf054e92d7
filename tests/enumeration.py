"""Exact enumeration of what the product emits: noise and coins are forced, chances multiplied.

Every path of drafts runs through the real draft and verify steps in one batch. Draft noise that
is large at the wished token forces a draft; coins of 0 or 1 force an accepted length; target noise
forces the token after it. The chance of a branch is made of the product's own arrays: the laws it
published, its acceptance thresholds and its residual laws.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, Int

from dspark_jax import decode, draft, verify
from dspark_jax.state import Proposal

CERTAIN = 1e6  # noise that decides a draw
HISTORIES = 16  # of a batch; each is repeated for every path


def forced_draft(config: Any, params: Any, state: Any, noise: Float[Any, "B P V"]) -> Any:
    """`draft_step` with its noise handed in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "draft_noise", lambda state, slot, decoding, size: noise[:, slot])
        return decode.draft_step.__wrapped__(config, params, state)


def forced_verify(
    config: Any,
    params: Any,
    state: Any,
    proposal: Proposal,
    flips: Float[Any, "B P"],
    noise: Float[Any, "B V"],
) -> Any:
    """`verify_step` with its coins and noise handed in; also the laws it judged by [B, T, V]."""
    seen, judge = [], verify.judge

    def watched(laws: Any, *rest: Any) -> Any:
        seen.append(laws)
        return judge(laws, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "judge", watched)
        patch.setattr(verify, "coins", lambda *_: flips)
        patch.setattr(verify, "gumbel_noise", lambda *_: noise)
        state, output = decode.verify_step.__wrapped__(config, params, state, proposal)
    return state, output, seen[0]


def thresholds(laws: Any, proposal: Proposal, rejection: str) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance thresholds [B, P], zero past the proposal, and residual weights [B, P + 1]."""
    chain = verify.chain_products(laws, proposal)
    if rejection == "block":
        each, weights = verify.block_thresholds(laws, proposal, chain), np.asarray(chain)
    else:
        each, weights = verify.token_thresholds(laws, proposal), np.ones(chain.shape)
    proposed = np.arange(each.shape[1]) < np.asarray(proposal.length)[:, None]
    return np.where(proposed, np.asarray(each, np.float64), 0.0), weights


def length_chances(each: Float[np.ndarray, "B P"], rejection: str) -> Float[np.ndarray, "B T"]:
    """P(accepted = n): up to the first failing coin (token) or to the last passing one (block)."""
    ones = np.ones((len(each), 1))
    if rejection == "token":
        reached = np.cumprod(np.hstack([ones, each]), 1)
        return reached * np.hstack([1 - each, ones])
    above = np.cumprod(np.hstack([ones, (1 - each)[:, ::-1]]), 1)[:, ::-1]
    return np.hstack([ones, each]) * above


def forcing_coins(accepted: Int[np.ndarray, " B"], drafts: int, rejection: str) -> np.ndarray:
    """Coins after which exactly `accepted` drafts stand: 0 passes if it can, 1 never passes."""
    slots = np.arange(1, drafts + 1)
    passing = slots <= accepted[:, None] if rejection == "token" else slots == accepted[:, None]
    return np.where(passing, 0.0, 1.0).astype(np.float32)


def residuals(laws: Any, proposal: Proposal, weights: np.ndarray) -> Float[np.ndarray, "B T V"]:
    """Law of the token after n accepted drafts, for every n."""
    batch, count, _ = laws.shape
    each = [
        verify.residual_law(
            laws, proposal, jnp.full(batch, n), jnp.asarray(weights[:, n], jnp.float32)
        )
        for n in range(count)
    ]
    return np.stack([np.asarray(law, np.float64) for law in each], 1)


@dataclass(frozen=True)
class History:
    """A text emitted so far in a certain pattern of rounds, by one row of the state."""

    group: int  # rows of the first state; each has its own law
    text: tuple[int, ...]
    chance: float


@dataclass
class Programs:
    """The compiled halves of a round, each with its own static configuration."""

    draft: Callable[[Any, Any], Any]  # state, noise -> state, proposal
    verify: Callable[..., Any]  # state, proposal, coins, noise -> state, output, laws
    rejection: str
    vocab: int
    drafts: int


class Enumeration:
    """Joint law of the first `length` emitted tokens, over as many rounds as they take."""

    def __init__(self, programs: Programs, length: int) -> None:
        self.programs, self.length = programs, length
        paths = list(itertools.product(range(programs.vocab), repeat=programs.drafts))
        self.paths = np.array(paths)

    def run(self, state: Any, groups: int) -> tuple[np.ndarray, np.ndarray]:
        """Law of the product and law of the target, each [groups, V, ..., V].

        `state` holds one running row a group.
        """
        vocab, length = self.programs.vocab, self.length
        self.rounds, self.lengths = 0, set()
        self.law = np.zeros((groups, vocab**length))
        self.expected = np.zeros((groups, vocab**length))
        waiting = [
            (History(g, (), 1.0), jax.tree.map(lambda x, g=g: np.asarray(x)[g], state))
            for g in range(groups)
        ]
        while waiting:
            self.rounds += 1
            later = []
            for begin in range(0, len(waiting), HISTORIES):
                part = waiting[begin : begin + HISTORIES]
                later += self.one_round([h for h, _ in part], [row for _, row in part])
            waiting = later
        shape = (groups,) + (vocab,) * length
        return self.law.reshape(shape), self.expected.reshape(shape)

    def path_law(self, laws: Float[np.ndarray, "H paths T V"]) -> np.ndarray:
        """Chance of each text of `length` tokens when the target draws one after the other."""
        vocab, drafts = self.programs.vocab, self.programs.drafts
        total = np.ones((len(laws), 1))
        for k in range(self.length):
            stride = vocab ** (drafts - k)
            step = laws[:, ::stride, k]  # one path a prefix of k tokens
            total = (total[:, :, None] * step).reshape(len(laws), -1)
        return total

    def one_round(self, histories: Sequence[History], rows: Sequence[Any]) -> list[tuple]:
        """Branch every history; returns the histories that go on, each with its row."""
        programs, paths = self.programs, self.paths
        padded = [*rows, *[rows[0]] * (HISTORIES - len(rows))]
        state = jax.tree.map(lambda *x: np.repeat(np.stack(x), len(paths), axis=0), *padded)
        wished = np.tile(np.eye(programs.vocab)[paths], (HISTORIES, 1, 1))
        state, proposal = programs.draft(state, jnp.asarray(CERTAIN * wished, jnp.float32))
        drafted = self.draft_chances(proposal)
        self.lengths |= set(np.asarray(proposal.length).tolist())
        batch = len(drafted)
        no_coins, no_noise = jnp.ones((batch, programs.drafts)), jnp.zeros((batch, programs.vocab))
        _, _, laws = programs.verify(state, proposal, no_coins, no_noise)
        if self.rounds == 1:
            every = proposal.replace(tokens=jnp.asarray(np.tile(paths, (HISTORIES, 1)), jnp.int32))
            _, _, told = programs.verify(state, every, no_coins, no_noise)
            told = np.asarray(told, np.float64).reshape(HISTORIES, len(paths), *told.shape[1:])
            self.expected[:] = self.path_law(told[: len(histories)])
        each, weights = thresholds(laws, proposal, programs.rejection)
        chances = (
            drafted[:, None, None]
            * length_chances(each, programs.rejection)[:, :, None]
            * residuals(laws, proposal, weights)
        ).reshape(HISTORIES, len(paths), programs.drafts + 1, programs.vocab)
        return self.advance(self.branch(histories, chances), state, proposal)

    def draft_chances(self, proposal: Proposal) -> Float[np.ndarray, " B"]:
        """Chance of each path; a draft could not be forced only where its chance is zero."""
        path = np.tile(self.paths, (HISTORIES, 1))
        probs = np.take_along_axis(np.asarray(proposal.probs), path[:, :, None], 2)[:, :, 0]
        chance = np.prod(probs.astype(np.float64), 1)
        forced = (np.asarray(proposal.tokens) == path).all(1)
        assert (chance[~forced] == 0).all()
        return chance

    def branch(self, histories: Sequence[History], chances: np.ndarray) -> list[tuple]:
        """Book finished texts in the law; list the others as (history, row, accepted, token)."""
        vocab, drafts, branches = self.programs.vocab, self.programs.drafts, []
        for (h, history), n in itertools.product(enumerate(histories), range(drafts + 1)):
            by_prefix = history.chance * chances[h, :, n].reshape(vocab**n, -1, vocab)
            total = by_prefix.sum(1)
            missing = self.length - len(history.text)
            if n + 1 >= missing:
                known = np.sum([vocab**i * t for i, t in enumerate(history.text[::-1])], dtype=int)
                after = self.law[history.group].reshape(-1, vocab**missing)[known]
                after += total.reshape(vocab**missing, -1).sum(1)
                continue
            for prefix, token in zip(*np.nonzero(total), strict=True):
                path = prefix * by_prefix.shape[1] + by_prefix[prefix, :, token].argmax()
                text = (*history.text, *self.paths[path][:n].tolist(), int(token))
                longer = History(history.group, text, float(total[prefix, token]))
                branches.append((longer, h * len(self.paths) + path, n, token))
        return branches

    def advance(self, branches: list[tuple], state: Any, proposal: Proposal) -> list[tuple]:
        """Commit each branch through the real verify step, with the coins and noise it takes."""
        programs, batch = self.programs, HISTORIES * len(self.paths)
        assert len(branches) <= batch
        if not branches:
            return []
        filled = branches + [branches[0]] * (batch - len(branches))
        rows, accepted, tokens = (np.array([branch[i] for branch in filled]) for i in (1, 2, 3))
        state, proposal = jax.tree.map(lambda x: np.asarray(x)[rows], (state, proposal))
        noise = CERTAIN * np.eye(programs.vocab, dtype=np.float32)[tokens]
        coins = forcing_coins(accepted, programs.drafts, programs.rejection)
        state, output, _ = programs.verify(state, proposal, jnp.asarray(coins), jnp.asarray(noise))
        counts, emitted = np.asarray(output.counts), np.asarray(output.tokens)
        np.testing.assert_array_equal(counts[:, 0], accepted + 1)
        np.testing.assert_array_equal(counts[:, 3], 0)
        for i, (history, *_) in enumerate(branches):
            assert tuple(emitted[i, : counts[i, 0]]) == history.text[-counts[i, 0] :]
        state = jax.tree.map(np.asarray, state)
        return [
            (history, jax.tree.map(lambda x, i=i: x[i], state))
            for i, (history, *_) in enumerate(branches)
        ]
