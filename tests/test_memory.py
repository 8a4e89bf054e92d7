"""The plan against real arrays and compiled programs, and the advice when it does not fit."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from dspark_jax import memory
from dspark_jax.decode import init_state
from dspark_jax.memory import (
    DeviceMemoryError,
    MemoryPlan,
    check_memory,
    largest_max_length,
    plan_memory,
)
from dspark_jax.programs import Programs, Tier
from tests.tiny import decoding, plain_config, random_params, tiny_config

CONFIG = tiny_config(vocab=300, max_length=700)
WIDE = tiny_config(vocab=5000, max_length=64)
REDUCED = tiny_config(vocab=40, draft={"draft_vocab_size": 20, "own_head": True})
OWNING = tiny_config(markov="rnn", draft={"own_embedding": True, "own_head": True})


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "config",
    [CONFIG, REDUCED, OWNING, plain_config(CONFIG), replace(OWNING, dtype="bfloat16")],
    ids=["borrowing", "reduced", "owning", "plain", "bfloat16"],
)
def test_weights_and_cache_are_exact(config):
    plan = plan_memory(config, max_batch=3)
    params = random_params(config)
    state = init_state(config, 3)
    assert plan.weights == nbytes(params)
    assert plan.cache == nbytes(state.target) + nbytes(state.draft)


@pytest.mark.parametrize(
    ("config", "tier"),
    [
        (CONFIG, Tier(batch=4)),
        (
            decoding(WIDE, rejection="block", ceiling=True),
            Tier(batch=4, controls=True, logprobs=20),
        ),
        (decoding(WIDE, sampled=False), Tier(batch=4, sampled=False)),
    ],
    ids=["cache", "laws of a large vocabulary", "greedy"],
)
def test_workspace_bounds_what_the_compiler_takes(config, tier):
    programs = Programs(config, random_params(config))
    programs.compile_missing(tier)
    taken = max(
        program.memory_analysis().temp_size_in_bytes for program in programs._compiled.values()
    )
    assert taken <= plan_memory(config, 4).workspace <= 4 * taken


def test_too_much_names_sum_free_memory_and_the_largest_length():
    whole = plan_memory(CONFIG, 8)
    free = whole.total - 1
    longest = largest_max_length(CONFIG, 8, free)
    assert plan_memory(decoding(CONFIG, max_length=longest), 8).total <= free
    assert plan_memory(decoding(CONFIG, max_length=longest + 1), 8).total > free
    with pytest.raises(DeviceMemoryError) as caught:
        check_memory(CONFIG, 8, free)
    assert str(caught.value) == (
        f"max_length 700 with max_batch 8 needs {whole}, but the device has"
        f" {memory.show_bytes(free)} free; max_length {longest} is the largest that fits"
    )
    assert check_memory(CONFIG, 8, whole.total) == whole
    assert check_memory(CONFIG, 8, None) == whole


def test_advice_where_no_length_fits():
    with pytest.raises(DeviceMemoryError, match="no max_length fits; lower max_batch"):
        check_memory(CONFIG, 8, 1000)
    with pytest.raises(DeviceMemoryError, match="no max_length fits; take a smaller model"):
        check_memory(CONFIG, 1, 1000)


def test_free_memory_of_an_accelerator_is_its_pool():
    stats = {"bytes_limit": 100, "bytes_in_use": 30}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    assert memory.free_memory(gpu) == 70
    silent = SimpleNamespace(platform="tpu", memory_stats=lambda: None)
    assert memory.free_memory(silent) is None


def test_free_memory_of_the_host_heeds_a_container(tmp_path, monkeypatch):
    host = memory.free_memory(jax.devices("cpu")[0])
    assert host is None or host > 10**8
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    (tmp_path / "memory.stat").write_text("anon 100\ninactive_file 250\n")
    assert memory._cgroup_room(tmp_path) == 850
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_room(tmp_path) is None
    monkeypatch.setattr(memory, "_cgroup_room", lambda: 12)
    assert memory._free_host_memory() == 12


def test_bytes_for_a_reader():
    assert [memory.show_bytes(n) for n in (1_234, 56_700_000, 23_400_000_000)] == [
        "1.2 kB",
        "56.7 MB",
        "23.4 GB",
    ]
    assert str(MemoryPlan(10**9, 10**9, 10**6)) == (
        "2.0 GB (weights 1.0 GB, cache 1.0 GB, workspace 1.0 MB)"
    )
