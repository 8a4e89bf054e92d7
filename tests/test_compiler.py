"""What XLA is asked for, and that a user's own flag wins."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from dspark_jax import compiler
from dspark_jax.compiler import OPTIONS, compiler_options


@pytest.fixture(autouse=True)
def of_any_jax(monkeypatch):
    monkeypatch.setattr(compiler, "RUN_SINCE", (0,))
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_xla_knows_the_options():
    assert compiler_options() == OPTIONS
    lowered = jax.jit(jnp.sin).lower(jnp.ones(3))
    compiled = lowered.compile(compiler_options())  # an unknown name or value would raise
    assert compiled(jnp.ones(3)).shape == (3,)


def test_a_flag_of_the_user_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert compiler_options() == {}


def test_an_earlier_jax_keeps_its_defaults(monkeypatch):
    monkeypatch.setattr(compiler, "RUN_SINCE", (99,))
    assert compiler_options() == {}
