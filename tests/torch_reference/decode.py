"""The speculative loop of the published reference: one row, eager, host reads everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.torch_reference.draft import Block, TorchDraft
from tests.torch_reference.target import tapped_forward

GREEDY_TEMPERATURE = 1e-5
RESIDUAL_FLOOR = 1e-8


@dataclass
class Round:
    """The anchor's position and token, and what the draft computed from them."""

    start: int
    anchor: int
    block: Block


@dataclass
class Run:
    """`output_ids` contain the prompt; one length a round."""

    output_ids: list[int]
    acceptance_lengths: list[int] = field(default_factory=list)
    proposal_lengths: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)


@dataclass
class Sampler:
    """Laws and draws at one temperature; below 1e-5 everything is the argmax."""

    temperature: float
    generator: torch.Generator

    def law(self, logits: Tensor) -> Tensor:
        if self.temperature < GREEDY_TEMPERATURE:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
        return torch.softmax(logits.float() / self.temperature, -1)

    def draw(self, law: Tensor) -> int:
        if self.temperature < GREEDY_TEMPERATURE:
            return int(law.argmax())
        return int(torch.multinomial(law, 1, generator=self.generator))

    def coin(self) -> float:
        return float(torch.rand((), generator=self.generator))


def verify(sampler: Sampler, drafts: list[int], draft_laws: Tensor, target_laws: Tensor):
    """Return the accepted count and the token after it: token-wise rejection.

    `draft_laws` [P, V] and `target_laws` [P + 1, V]; sources: Leviathan et al. 2023, and the
    reference's residual floor.
    """
    for k, token in enumerate(drafts):
        ratio = target_laws[k, token] / draft_laws[k, token].clamp_min(1e-8)
        if sampler.coin() < min(1.0, float(ratio)):
            continue
        residual = (target_laws[k] - draft_laws[k]).clamp_min(0)
        mass = residual.sum()
        return k, sampler.draw(residual / mass if mass > RESIDUAL_FLOOR else target_laws[k])
    return len(drafts), sampler.draw(target_laws[len(drafts)])


def proposal_length(block: Block, threshold: float) -> int:
    """Drafts before the first position whose confidence is below the threshold (0: all)."""
    if threshold <= 0 or block.confidence is None:
        return len(block.tokens)
    below = (torch.sigmoid(block.confidence) < threshold).nonzero()
    return int(below[0]) if len(below) else len(block.tokens)


def spread(draft: TorchDraft, laws: Tensor, vocab: int) -> Tensor:
    """Put the draft's laws [P, Vd] on the target's ids [P, V]."""
    return laws.new_zeros(len(laws), vocab).index_copy(1, draft.draft_to_target, laws)


@torch.no_grad()
def generate(
    target: PreTrainedModel,
    draft: TorchDraft | None,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    stop_token_ids: Sequence[int] = (),
    confidence_threshold: float = 0.0,
    seed: int = 0,
) -> Run:
    """Decode one prompt; without a draft every round verifies the anchor alone."""
    sampler = Sampler(temperature, torch.Generator().manual_seed(seed))
    taps = draft.taps if draft else []
    target_cache = DynamicCache()
    draft_cache = draft.init_cache() if draft else []
    run = Run(list(prompt_ids))
    logits, features = tapped_forward(target, prompt_ids, taps, target_cache)
    run.output_ids.append(sampler.draw(sampler.law(logits[-1])))
    start, limit = len(prompt_ids), len(prompt_ids) + max_new_tokens
    stopped = run.output_ids[-1] in stop_token_ids
    while start < limit and not stopped:
        anchor, proposed, draft_laws = run.output_ids[start], 0, logits.new_zeros(0)
        drafts: list[int] = []
        if draft:
            block = draft.propose(
                anchor, features, draft_cache, lambda row: sampler.draw(sampler.law(row))
            )
            proposed = proposal_length(block, confidence_threshold)
            drafts = block.tokens[:proposed]
            draft_laws = spread(draft, sampler.law(block.logits), logits.shape[-1])
            run.rounds.append(Round(start, anchor, block))
        logits, features = tapped_forward(target, [anchor, *drafts], taps, target_cache)
        accepted, follow = verify(sampler, drafts, draft_laws, sampler.law(logits))
        stops = [e for e in range(accepted) if drafts[e] in stop_token_ids]
        if stops:
            kept = drafts[: stops[0] + 1]
            proposed, stopped = len(kept), True
        else:
            kept = [*drafts[:accepted], follow]
            stopped = follow in stop_token_ids
        run.output_ids += kept
        run.acceptance_lengths.append(len(kept))
        run.proposal_lengths.append(proposed)
        start += len(kept)
        features = features[: len(kept)]
        if len(kept) <= len(drafts):
            target_cache.crop(len(kept) - len(drafts) - 1)  # minus so many rows
    del run.output_ids[limit:]
    return run
