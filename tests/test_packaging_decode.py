"""A draft in any packaging drafts the same tokens; every one leaves the target's text as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.packaging import DraftOverrides
from dspark_jax import decode
from tests.checkpoints import write_draft, write_reduced, write_target
from tests.pairs import load_pair
from tests.tiny import Request, plain_config, quick_compilation, run_alone, start
from tests.tiny_pair import TinyPair

PROMPT = np.random.default_rng(3).integers(0, 60, 13).tolist()
DECODING = {"max_length": 64, "prefill_chunk": 16, "sampled": False}


@pytest.fixture(autouse=True, scope="module")
def compile_quickly() -> Any:
    with quick_compilation():
        yield


def small(**changes: Any) -> TinyPair:
    pair = TinyPair(depth=3, draft_depth=1, taps=(-1, 0, 1), block=4, seed=5, **changes)
    if pair.markov != "none":
        pair.draft["markov_head.markov_w2.weight"] *= 16  # so that the drafts differ by position
    return pair


def drafted(config: Any, params: Any) -> list[int]:
    """The tokens proposed right after the prompt."""
    state = decode.init_state(config, 1)
    state, _ = start(config, params, state, 0, Request(PROMPT, 24))
    _, proposal = decode.draft_step(config, params, state)
    return np.asarray(proposal.tokens)[0].tolist()


def decoded(folder: Path, pair: TinyPair, dialect: str, **overrides: Any) -> Any:
    write_target(folder / "target", pair)
    write_draft(folder / "draft", pair, dialect)
    config, params = load_pair(folder, overrides=DraftOverrides(**overrides), **DECODING)
    return config, run_alone(config, params, Request(PROMPT, 24)), drafted(config, params)


def test_dspark_packagings_draft_the_same_tokens(tmp_path: Path) -> None:
    pair = small()
    ours = decoded(tmp_path / "ours", pair, "deepspec")
    assert len(set(ours[2])) > 1
    for dialect in ("torchspec", "torchspec-native", "speculators", "specforge", "specforge-old"):
        block = {"block_size": 4} if dialect == "torchspec" else {}
        assert decoded(tmp_path / dialect, pair, dialect, **block) == ours


def test_dflash_drafts_the_same_tokens_as_rank_zero_without_the_anchor(tmp_path: Path) -> None:
    pair = small(markov="none", confidence="none")
    ours = decoded(tmp_path / "ours", pair, "deepspec", sample_from_anchor=False)
    assert set(ours[1].proposal_lengths) == {3}
    for dialect in ("z-lab", "z-lab-new"):
        assert decoded(tmp_path / dialect, pair, dialect) == ours


def test_a_reduced_vocabulary_leaves_the_text_as_it_is(tmp_path: Path) -> None:
    pair = small()
    write_target(tmp_path / "target", pair)
    kept = np.sort(np.random.default_rng(0).permutation(64)[:40])
    write_reduced(tmp_path / "draft", pair, kept)
    config, params = load_pair(tmp_path, **DECODING)
    assert config.draft is not None
    assert config.draft.reduced_vocabulary
    reduced = run_alone(config, params, Request(PROMPT, 24))
    plain = run_alone(plain_config(config), params, Request(PROMPT, 24))
    assert reduced.tokens == plain.tokens
    assert set(drafted(config, params)) <= set(kept.tolist())
