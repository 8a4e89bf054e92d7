"""What a device did, read from a profile: one event a kernel, library call or copy."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

GPU_PLANE, CPU_PLANE = "/device:GPU:", "/host:CPU"
THUNKS = 2  # level of the host tracer that notes what a CPU runs; kernels need none


@dataclass(frozen=True)
class Event:
    """A span on a device in microseconds, and the HLO instruction that it ran, where known."""

    name: str
    start_us: float
    time_us: float
    hlo_op: str = ""


def record_events(call: Callable[[], Any]) -> list[Event]:
    """Run `call` to its end under the profiler; events come in the order of their start.

    On a CPU the events of loops and branches enclose those inside. Raises RuntimeError where the
    profile holds nothing.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0 if jax.devices()[0].platform == "gpu" else THUNKS
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(call())
        with warnings.catch_warnings():  # Python 3.12 about how the reader's types were built
            warnings.simplefilter("ignore", DeprecationWarning)
            events = sorted(_read(Path(folder)), key=lambda event: event.start_us)
    if not events:
        raise RuntimeError("the profile holds no kernels: the device's tracer did not start")
    return events


def _read(folder: Path) -> Iterator[Event]:
    for path in folder.rglob("*.xplane.pb"):
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
        devices = sorted(plane.name for plane in planes if plane.name.startswith(GPU_PLANE))
        for plane in planes:
            on_gpu = plane.name in devices[:1]  # all devices of a mesh do the same
            if not on_gpu and plane.name != CPU_PLANE:
                continue
            for line in plane.lines:
                if on_gpu and not line.name.startswith("Stream"):
                    continue  # lines that repeat the streams by module and op
                for event in line.events:
                    op = str(dict(event.stats).get("hlo_op", ""))
                    if on_gpu or op:
                        start, time = event.start_ns / 1e3, event.duration_ns / 1e3
                        yield Event(event.name, start, time, op)


def gaps_us(events: list[Event]) -> float:
    """Microseconds between the first start and the last end in which nothing ran."""
    idle, end = 0.0, events[0].start_us
    for event in events:
        idle += max(0.0, event.start_us - end)
        end = max(end, event.start_us + event.time_us)
    return idle
