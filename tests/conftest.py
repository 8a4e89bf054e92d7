"""Compiled programs are kept on disk for all tests of one run, and in memory for one module."""

import gc

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module", autouse=True)
def released_programs():
    """Drops what a module compiled: a process may hold 65,530 mappings (vm.max_map_count) and each
    program of XLA's CPU backend takes several; past them LLVM ends the process."""
    yield
    jax.clear_caches()
    gc.collect()
