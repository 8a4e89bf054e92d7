"""Compiled programs are shared by all tests of one run, and by no other run."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
