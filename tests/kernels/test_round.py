"""The whole round, compiled for GPUs that are not present: what is in it, what is copied."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from dspark_jax import decode
from dspark_jax.cache import capacity
from dspark_jax.config import (
    DecodeConfig,
    DraftConfig,
    LayersConfig,
    ModelConfig,
    RopeConfig,
    TargetConfig,
)
from dspark_jax.draft import Draft
from dspark_jax.layers import abstract_params
from dspark_jax.sharding import abstract_state, param_shardings, use_mesh
from dspark_jax.target import Target
from dspark_jax.tiers import BatchCosts
from pallas_kernels.platform import decide_for
from tests.kernels.described import (
    compile_for,
    copied_arrays,
    described_device,
    described_devices,
    dump_to,
    graphs_of,
    kernel_calls,
    needs_compiler,
)
from tests.tiny import quick_compilation

pytestmark = needs_compiler
TARGET_LAYERS, DRAFT_LAYERS, BATCH = 2, 1, 2


def small_pair(implementation: str) -> ModelConfig:
    """A pair whose heads the kernels take."""
    layers = LayersConfig(
        hidden_size=64,
        intermediate_size=128,
        num_layers=TARGET_LAYERS,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        rope=RopeConfig(),
    )
    draft = DraftConfig(
        layers=replace(layers, num_layers=DRAFT_LAYERS, windows=()),
        vocab_size=64,
        draft_vocab_size=64,
        block_size=7,
        mask_token_id=3,
        taps=(-1, 0),
        target_hidden_size=64,
        markov="vanilla",
        markov_rank=16,
        confidence="markov",
    )
    decoding = DecodeConfig(max_length=248, num_drafts=7, implementation=implementation)
    return ModelConfig(TargetConfig(layers, 64, max_length=512), draft, decoding, "bfloat16")


def compile_round(
    config: ModelConfig, capability: str, *rounds: int, dump: Path | None = None
) -> str:
    """One round, or as many as are named in their loop."""
    entry = decode.decode_rounds if rounds else decode.decode_round
    params = {
        "target": abstract_params(Target, config.target, config.dtype),
        "draft": abstract_params(Draft, config.draft, config.dtype),
    }
    state = jax.eval_shape(partial(decode.init_state, config, BATCH))
    device = described_device(capability)
    with decide_for(device):
        return compile_for(
            device,
            lambda state, params: entry.__wrapped__(config, params, state, *rounds),
            state,
            params,
            donate=(0,),
            options=dump_to(dump) if dump else None,
        )


@pytest.mark.parametrize("capability", ["8.0", "8.9", "10.0", "12.0"])
def test_auto_has_no_kernel_on_other_gpus(capability):
    with quick_compilation():
        assert kernel_calls(compile_round(small_pair("auto"), capability)) == 0


@pytest.mark.parametrize("capability", ["8.0", "12.0"])
def test_pallas_is_refused_on_other_gpus(capability):
    with pytest.raises(ValueError, match=f"found .* of compute capability {capability}"):
        compile_round(small_pair("pallas"), capability)


def test_an_h200_runs_every_kernel_and_copies_no_cache(tmp_path: Path):
    config = small_pair("auto")
    config = replace(config, decode=replace(config.decode, rejection="gumbel"))
    program = compile_round(config, "9.0", 4, dump=tmp_path)
    assert graphs_of(tmp_path) == ["kCommandBuffer"]
    # A layer has two fused matmuls, writes q, k and v, attends and joins; the draft's context goes
    # into its cache once.
    assert kernel_calls(program) == 5 * (TARGET_LAYERS + DRAFT_LAYERS) + 1
    layers = config.target.layers
    shape = (BATCH, capacity(config), layers.num_kv_heads, layers.head_dim)
    assert copied_arrays(program, shape) == 0


def test_four_h200s_run_every_kernel_on_their_own_parts():
    """No copy of a cache, and nothing larger than a row of logits or activations is sent."""
    config = small_pair("auto")
    split = {"num_heads": 12, "num_kv_heads": 4}
    target = replace(config.target, layers=replace(config.target.layers, **split))
    draft = replace(config.draft, layers=replace(config.draft.layers, **split))
    config = replace(config, target=target, draft=draft)
    mesh = Mesh(np.array(described_devices(4)).reshape(2, 2), ("data", "tensor"))
    shapes = {
        "target": abstract_params(Target, target, config.dtype),
        "draft": abstract_params(Draft, draft, config.dtype),
    }
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        param_shardings(shapes, mesh),
    )
    state = abstract_state(partial(decode.init_state, config, BATCH), mesh)
    with decide_for(mesh.devices.flat[0]), use_mesh(mesh):
        program = decode.decode_round.lower(config, params, state).compile().as_text()
    assert kernel_calls(program) == 5 * (TARGET_LAYERS + DRAFT_LAYERS) + 1
    shape = (BATCH // 2, capacity(config), 4 // 2, config.target.layers.head_dim)
    assert copied_arrays(program, shape) == 0
    sent = re.findall(r"= (.*?) (?:all-reduce|all-gather)(?:-start)?\(", program)
    assert sent
    most = BATCH * config.decode.step_rows * config.target.vocab_size
    for sizes in re.findall(r"\[([\d,]*)\]", " ".join(sent)):
        assert math.prod(int(n) for n in sizes.split(",") if n) <= most
    assert not re.search(r" (all-to-all|collective-permute|reduce-scatter)(-start)?\(", program)


@pytest.mark.parametrize("decoding", [{"sampled": False}, {"rejection": "block", "controls": True}])
def test_a_call_of_rounds_is_one_cuda_graph(tmp_path: Path, decoding: dict[str, Any]):
    """Draft, verify and sampling, and the loop around them: the host starts one thing."""
    config = small_pair("auto")
    config = replace(config, decode=replace(config.decode, **decoding))
    compile_round(config, "9.0", 4, dump=tmp_path)
    assert graphs_of(tmp_path) == ["kCommandBuffer"]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_scheduled_round_copies_no_cache_into_its_branches(tmp_path, monkeypatch, in_place):
    """The caches go through a choice to draft and one of two sizes, in place; all is one graph."""
    monkeypatch.setattr("dspark_jax.choice.IN_PLACE", in_place)
    costs = BatchCosts(BATCH, plain=1.0, tokens=(8, 16), rounds=(1.3, 1.6))
    config = small_pair("auto")
    config = replace(config, decode=replace(config.decode, costs=(costs,)))
    program = compile_round(config, "9.0", 4, dump=tmp_path)
    assert graphs_of(tmp_path) == ["kCommandBuffer"]
    plain, draft, sizes = 5 * TARGET_LAYERS + 1, 5 * DRAFT_LAYERS + 1, 2 * 5 * TARGET_LAYERS
    assert kernel_calls(program) == plain + draft + sizes
    layers = config.target.layers
    shape = (BATCH, capacity(config), layers.num_kv_heads, layers.head_dim)
    assert copied_arrays(program, shape) == 0
