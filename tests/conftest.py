"""Compiled programs are kept on disk for all tests of one run, and so many of them in memory."""

import gc
from pathlib import Path

import jax
import pytest

MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), 25_000


@pytest.fixture(scope="session", autouse=True)
def shared_compilation_cache(tmp_path_factory):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(scope="module", autouse=True)
def released_programs():
    """Drops what was compiled before it is too much: a process may hold 65,530 mappings
    (vm.max_map_count), each program of XLA's CPU backend takes several, and past them LLVM ends
    the process."""
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
