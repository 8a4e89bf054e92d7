"""What a run takes on its device: summed before any weight is read, held against what is free."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dspark_jax.cache import cache_bytes, capacity
from dspark_jax.config import LayersConfig, ModelConfig
from dspark_jax.draft import Draft
from dspark_jax.layers import abstract_params
from dspark_jax.sharding import device_share, param_shardings
from dspark_jax.target import Target
from pallas_kernels.chunk_attention import cudnn_serves

ITEMSIZE = {"float32": 4, "bfloat16": 2}
# float32 arrays of B x T x V alive at once: logits, the laws of target and draft, the noise, and
# what filters, block verification, ceiling and log-probabilities make of them (XLA's own count for
# a round of all of these is 9.5); of greedy rows alone the logits and what is compared.
_SAMPLED_LAWS, _GREEDY_LOGITS = 10, 3


class DeviceMemoryError(ValueError):
    """Weights, cache and workspace do not fit the device."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of a run."""

    weights: int
    cache: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace

    def __str__(self) -> str:
        return (
            f"{show_bytes(self.total)} (weights {show_bytes(self.weights)}, cache"
            f" {show_bytes(self.cache)}, workspace {show_bytes(self.workspace)})"
        )


def plan_memory(config: ModelConfig, max_batch: int, mesh: Mesh | None = None) -> MemoryPlan:
    """Sum weights, caches of `max_batch` slots, and an upper bound of the working arrays.

    On a mesh the sums are those of each of its devices.
    """
    weights = weight_bytes(config, mesh)
    config, max_batch = device_share(config, max_batch, mesh)
    rows, size = capacity(config), ITEMSIZE[config.dtype]
    network = config.draft_network
    stacks = [config.target.layers, *([network.layers] if network else [])]
    caches = [cache_bytes(layers, 1, rows, size) for layers in stacks]
    # Rows move to a batch of another size array by array, between two calls.
    arrays = zip(caches, stacks, strict=True)
    moved = max_batch * max(cache // (2 * layers.num_layers) for cache, layers in arrays)
    working = max(_prefill_bytes(config), _round_bytes(config, max_batch), moved)
    return MemoryPlan(
        weights=weights, cache=max_batch * sum(caches), workspace=sum(caches) + working
    )


def weight_bytes(config: ModelConfig, mesh: Mesh | None = None) -> int:
    """Bytes of both networks' parameters; what the draft borrows from the target counts once.

    On a mesh those of each of its devices.
    """
    trees: list[Any] = [abstract_params(Target, config.target, config.dtype)]
    if config.draft_network:
        trees.append(abstract_params(Draft, config.draft_network, config.dtype))
    leaves, shapes = jax.tree.leaves(trees), [x.shape for x in jax.tree.leaves(trees)]
    if mesh is not None:
        places = jax.tree.leaves(param_shardings(trees, mesh))
        shapes = [place.shard_shape(shape) for place, shape in zip(places, shapes, strict=True)]
    return sum(math.prod(s) * x.dtype.itemsize for s, x in zip(shapes, leaves, strict=True))


def check_memory(
    config: ModelConfig, max_batch: int, free: int | None, mesh: Mesh | None = None
) -> MemoryPlan:
    """The plan, where it fits `free` bytes (None: unknown, everything fits).

    Raises DeviceMemoryError with the sum, the free memory and the largest max_length that fits.
    """
    plan = plan_memory(config, max_batch, mesh)
    if free is None or plan.total <= free:
        return plan
    longest = largest_max_length(config, max_batch, free, mesh)
    if longest:
        advice = f"max_length {longest} is the largest that fits"
    elif max_batch > 1:
        advice = "no max_length fits; lower max_batch, take a smaller model or a larger device"
    else:
        advice = "no max_length fits; take a smaller model or a larger device"
    raise DeviceMemoryError(
        f"max_length {config.decode.max_length} with max_batch {max_batch} needs {plan}, but the"
        f" device has {show_bytes(free)} free; {advice}"
    )


def largest_max_length(
    config: ModelConfig, max_batch: int, free: int, mesh: Mesh | None = None
) -> int:
    """The largest max_length whose plan fits `free` bytes; 0 where none does."""

    def fits(length: int) -> bool:
        shorter = replace(config, decode=replace(config.decode, max_length=length))
        return plan_memory(shorter, max_batch, mesh).total <= free

    low, high = 1, config.decode.max_length  # `low` fits or is below every length, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low > 1 else 0


def free_memory(device: jax.Device) -> int | None:
    """Bytes that the device can still take; None where neither jax nor the system says."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _free_host_memory() if device.platform == "cpu" else None


def _free_host_memory() -> int | None:
    limits = [_available_memory(), _cgroup_room()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _available_memory() -> int | None:
    """MemAvailable on Linux; elsewhere all physical memory, where the system tells."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kilobytes = next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        return int(kilobytes) * 1024
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _cgroup_room(folder: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What a container's memory limit leaves; page cache counts as free."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return limit - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):  # no limit reads "max"
        return None


def _prefill_bytes(config: ModelConfig) -> int:
    """One slot, one chunk of rows; logits of the last row only."""
    chunk = config.decode.prefill_chunk
    layers = config.target.layers
    flash = config.decode.implementation != "xla" and cudnn_serves(config.dtype, layers.head_dim)
    scored = 1 if flash else layers.num_heads  # flash attention holds a mask, no scores
    networks = _rows_bytes(config, layers, 1, chunk, scored)
    network, context = config.draft_network, 0
    features = len(network.taps) * layers.hidden_size if network else 0
    if network:
        own = network.layers
        context = 2 * own.num_layers * own.num_kv_heads * own.head_dim
    wide = chunk * (2 * features + 2 * context) * 4
    return networks + wide + _SAMPLED_LAWS * config.target.vocab_size * 4


def _round_bytes(config: ModelConfig, batch: int) -> int:
    """All slots, one block of rows; logits and laws of every row."""
    rows, decode = config.decode.step_rows, config.decode
    layers = config.target.layers
    networks = _rows_bytes(config, layers, batch, rows, layers.num_heads)
    alive = _SAMPLED_LAWS if decode.sampled else _GREEDY_LOGITS
    arrays = alive + bool(decode.costs)  # packed and not
    laws = arrays * batch * rows * config.target.vocab_size * 4
    network = config.draft_network
    features = batch * rows * (len(network.taps) if network else 0)
    return networks + laws + 2 * features * layers.hidden_size * 4


def _rows_bytes(
    config: ModelConfig, layers: LayersConfig, batch: int, rows: int, scored: int
) -> int:
    """Activations of one decoder layer and the scores of `scored` heads over a full cache."""
    heads = (layers.num_heads + 2 * layers.num_kv_heads) * layers.head_dim
    width = 6 * layers.hidden_size + 3 * layers.intermediate_size + 3 * heads
    scores = 3 * scored * capacity(config)
    float_cache = 2 * layers.num_kv_heads * layers.head_dim * capacity(config)
    return batch * 4 * (rows * (width + scores) + float_cache)


def show_bytes(count: int) -> str:
    """Bytes for a reader: 23.4 GB, 912 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
