"""A mesh of devices: what it refuses, and (with eight virtual devices) what it computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark_jax import load

HERE = Path(__file__).parent
EIGHT = "--xla_force_host_platform_device_count=8"


@pytest.mark.parametrize("suite", ["mesh_tokens", "mesh_programs"])
def test_with_eight_devices(suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / f"{suite}.py")]
    environment = os.environ | {"XLA_FLAGS": EIGHT, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel 2 x data_parallel 3 need 6 devices"):
        load(tensor_parallel=2, data_parallel=3)


def test_numbers_of_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1, got 0"):
        load(tensor_parallel=0)
    with pytest.raises(ValueError, match="data_parallel must be an integer, got '2'"):
        load(data_parallel="2")  # type: ignore[arg-type]
