"""What a mesh refuses, holds and sends. Run by test_sharding, with eight devices."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bench import step
from bench.models import random_params
from dspark_jax import costs, decode, load
from dspark_jax.cache import capacity
from dspark_jax.config import ModelConfig
from dspark_jax.draft import Draft
from dspark_jax.engine import Engine
from dspark_jax.generate import main
from dspark_jax.layers import abstract_params
from dspark_jax.memory import plan_memory
from dspark_jax.sharding import abstract_state, make_mesh, param_shardings, use_mesh
from dspark_jax.target import Target
from dspark_jax.tiers import BatchCosts
from tests.tiny import decoding, quick_compilation, tiny_config, tiny_layers

LAYERS = tiny_layers(num_layers=3, num_heads=8, num_kv_heads=4, intermediate_size=32)
CONFIG = tiny_config(vocab=64, draft={"layers": replace(LAYERS, num_layers=2, windows=())})
CONFIG = replace(CONFIG, target=replace(CONFIG.target, layers=LAYERS))
COLLECTIVE = re.compile(
    r" = (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def test_sizes_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="does not divide") as caught:
        load(tensor_parallel=4)
    assert str(caught.value) == (
        "tensor_parallel 4 does not divide query heads of the target 6, key heads of the target 2,"
        " query heads of the draft 6, key heads of the draft 2"
    )
    with pytest.raises(ValueError, match="data_parallel 3 does not divide max_batch 8"):
        load(data_parallel=3)


def test_the_command_line_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--tensor-parallel", "4"]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert "does not divide query heads of the target 6" in written.err
    assert "Traceback" not in written.err


def test_the_commands_of_the_readme_run(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    (command,) = re.findall(r"-m dspark_jax\.generate (.*-parallel .*)", readme)
    with quick_compilation():
        assert main([*command.split(), "--max-tokens", "4"]) == 0
    written = capsys.readouterr()
    assert "4 x cpu (cpu) as tensor 2 x data 2, float32, xla, memory of each " in written.err
    assert written.out


def test_a_mesh_of_the_callers_is_taken_by_its_axes() -> None:
    devices = np.array(jax.devices()[4:8]).reshape(2, 2)
    engine = load(mesh=Mesh(devices, ("tensor", "data")), max_length=64, max_batch=2)
    assert jax.tree.leaves(engine.params)[0].sharding.device_set == set(devices.flat)
    with pytest.raises(ValueError, match="axes data and tensor"):
        load(mesh=Mesh(devices, ("model", "data")))
    with pytest.raises(ValueError, match="leave tensor_parallel and data_parallel out"):
        load(mesh=Mesh(devices, ("tensor", "data")), tensor_parallel=2)


def placed(config: ModelConfig, mesh: Mesh, batch: int) -> tuple[Any, Any]:
    """Shapes of parameters and state with their shardings."""
    shapes = {
        "target": abstract_params(Target, config.target, config.dtype),
        "draft": abstract_params(Draft, config.draft, config.dtype),
    }
    params = jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        shapes,
        param_shardings(shapes, mesh),
    )
    return params, abstract_state(partial(decode.init_state, config, batch), mesh)


def compiled(config: ModelConfig, mesh: Mesh, entry: str, batch: int = 4) -> str:
    chunk = np.zeros(config.decode.prefill_chunk, np.int32)
    prompt = (np.int32(0), chunk, np.int32(3), np.bool_(True))
    with use_mesh(mesh):
        lowered = getattr(decode, entry).lower(
            config, *placed(config, mesh, batch), *(prompt if entry == "prefill" else ())
        )
    return lowered.compile().as_text()


def collectives(text: str) -> Counter[tuple[str, str]]:
    """(kind, stage) of every collective of a compiled program."""
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if match := COLLECTIVE.search(line):
            name = re.search(r'op_name="([^"]*)"', line)
            stages = name[1] if name else ""
            known = ("markov_walk", "context_kv", "dspark_propose", "target_verify")
            stage = next((stage for stage in (*known, "decode_sample") if stage in stages), stages)
            found[match[2], stage] += 1
    return found


@pytest.mark.parametrize("sampled", [False, True])
def test_a_round_sends_only_what_tensor_parallelism_needs(sampled: bool) -> None:
    """Two all-reduces a layer, one for the embedding, the logits once a network; none in the walk.

    The target's greedy logits are not gathered: the largest of each part are compared (two small
    all-reduces, value and id).
    """
    config = decoding(CONFIG, sampled=sampled)
    expected = {
        ("all-reduce", "dspark_propose"): 2 * config.draft.layers.num_layers + 1,
        ("all-gather", "dspark_propose"): 1,
        ("all-reduce", "target_verify"): 2 * config.target.layers.num_layers + 1,
        ("all-gather" if sampled else "all-reduce", "decode_sample"): 1 if sampled else 2,
    }
    assert collectives(compiled(config, make_mesh(4, 1), "decode_round")) == expected


def test_a_scheduled_round_sends_the_same_in_each_of_its_branches() -> None:
    """Three sizes of a verify pass and a plain one; to choose among them nothing is sent."""
    table = BatchCosts(4, plain=1.0, tokens=(8, 12, 20), rounds=(1.2, 1.3, 1.6))
    config = decoding(CONFIG, sampled=False, costs=(table,))
    expected = {
        ("all-reduce", "dspark_propose"): 2 * config.draft.layers.num_layers + 1,
        ("all-gather", "dspark_propose"): 1,
        ("all-reduce", "target_verify"): 4 * (2 * config.target.layers.num_layers + 1),
        ("all-reduce", "decode_sample"): 4 * 2,
    }
    assert collectives(compiled(config, make_mesh(4, 1), "decode_round")) == expected


def test_costs_are_measured_on_the_mesh_that_they_are_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    mesh = make_mesh(4, 1)
    config = decoding(CONFIG, max_length=32)
    engine = Engine(config, random_params(config, mesh), max_batch=1, mesh=mesh)
    with quick_compilation():
        path = engine.profile_costs()
    assert costs.find_costs(config, mesh=mesh) == path
    assert costs.find_costs(config) is None
    assert len(costs.read_costs(path, config, mesh)) == 2
    with pytest.raises(ValueError, match="tensor_parallel 4, this run has 1"):
        costs.read_costs(path, config)


def test_scheduled_verification_splits_no_slots() -> None:
    with pytest.raises(ValueError, match="cannot split them; leave data_parallel out"):
        load(verification="scheduled", data_parallel=2)
    with pytest.raises(ValueError, match="cannot split them; leave data_parallel out"):
        load(tensor_parallel=2, data_parallel=2).profile_costs()


def test_slots_are_split_without_a_word_about_caches() -> None:
    """Between data parts only what is settled for every host goes round: the emitted tokens."""
    config = decoding(CONFIG, sampled=False)
    rows = capacity(config)
    for entry in ("decode_round", "prefill"):
        text = compiled(config, make_mesh(1, 4), entry)
        for line in text.splitlines():
            if match := COLLECTIVE.search(line):
                assert f",{rows}," not in match[1], line
                sizes = re.findall(r"\[([\d,]*)\]", match[1])
                assert all(np.prod([int(n) for n in s.split(",") if n]) <= 512 for s in sizes), line


def test_each_device_holds_its_share() -> None:
    mesh = make_mesh(2, 2)
    engine = load(tensor_parallel=2, data_parallel=2, max_length=64, max_batch=4)
    held: Counter[Any] = Counter()
    for leaf in jax.tree.leaves(engine.params):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    plan = plan_memory(engine.config, 4, mesh)
    assert set(held.values()) == {plan.weights}
    alone = plan_memory(engine.config, 4)
    assert plan.cache == alone.cache / 4
    assert plan.weights < 0.55 * alone.weights
    assert plan.workspace < alone.workspace


def test_bench_step_measures_on_a_mesh(tmp_path: Path) -> None:
    out = tmp_path / "step.jsonl"
    flags = ["--tensor-parallel", "2", "--data-parallel", "2", "--out", str(out)]
    with quick_compilation():
        assert step.main([*flags, "--batch", "2", "--cached", "8", "--step", "verify_step"]) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert line["shape"]["mesh"] == {"tensor": 2, "data": 2}
    mesh = make_mesh(2, 2)
    config, params = step.pair("embedded", "float32", mesh, max_length=520)
    assert line["bytes"] == step.step_bytes(config, params, 2, 8, mesh)["verify_step"]
