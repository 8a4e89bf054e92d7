"""A mesh of devices: what it refuses, and (with eight virtual devices) what it computes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import AbstractMesh

from dspark_jax import load
from dspark_jax.checkpoints import EMBEDDED
from tests import two_processes

HERE = Path(__file__).parent
EIGHT = "--xla_force_host_platform_device_count=8"


@pytest.mark.parametrize("suite", ["mesh_tokens", "mesh_programs"])
def test_with_eight_devices(suite: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / f"{suite}.py")]
    environment = os.environ | {"XLA_FLAGS": EIGHT, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "store"
    pair = ["--target", str(EMBEDDED / "target"), "--draft", str(EMBEDDED / "draft")]
    command = [sys.executable, "-m", "convert", *pair, "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_two_processes_decode_as_one_and_read_their_own_parts(store: Path) -> None:
    """Heads are split between the processes and slots inside each; jax joins them over gloo."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": EIGHT.replace("8", "2"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.two_processes", str(port)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(store)],
            env=environment,
            cwd=HERE.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        written = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], written
    found = [json.loads(out.splitlines()[-1]) for out, _ in written]
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["seeds"] == found[1]["seeds"]
    seeded = zip(two_processes.PARAMS, found[0]["seeds"], strict=True)
    alone = two_processes.decode(
        str(store), params=[replace(one, seed=seed) for one, seed in seeded]
    )
    assert found[0]["tokens"] == alone["tokens"]
    assert alone["share"] == 1.0
    for process in found:
        assert "devices of all 2 processes, got those of 1" in process["refused"]
        assert process["share"] < 0.6
        assert process["read"] <= 1.1 * process["share"] * alone["read"]


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel 2 x data_parallel 3 need 6 devices"):
        load(tensor_parallel=2, data_parallel=3)


def test_numbers_of_devices_are_checked() -> None:
    with pytest.raises(ValueError, match="tensor_parallel must be at least 1, got 0"):
        load(tensor_parallel=0)
    with pytest.raises(ValueError, match="data_parallel must be an integer, got '2'"):
        load(data_parallel="2")  # type: ignore[arg-type]


@pytest.mark.parametrize("mesh", ["2x2", (2, 2), AbstractMesh((1, 1), ("data", "tensor"))])
def test_a_mesh_is_one_of_devices(mesh: Any) -> None:
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh of devices, got"):
        load(mesh=mesh)
