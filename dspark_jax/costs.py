"""What rounds cost on a device: measured by batch and verified tokens, kept in a file.

The times depend on shapes and device, not on what the weights say: the file's name is a digest of
those, so that one folder serves several devices and settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, Int

from dspark_jax.choice import choose
from dspark_jax.compiler import compiler_options
from dspark_jax.config import DraftConfig, ModelConfig, default_dtype
from dspark_jax.decode import entry, init_state
from dspark_jax.files import expand, read_object
from dspark_jax.rounds import batch_costs, plain_round, propose, verify_tier
from dspark_jax.schedule import fill_tier
from dspark_jax.scheduler import batch_tiers
from dspark_jax.sharding import DATA, TENSOR, make_state, use_mesh
from dspark_jax.state import DecodeState, Params
from dspark_jax.tiers import BatchCosts, verified_tiers
from pallas_kernels.platform import default_device, implementation_for

VERSION = 4
FOLDER = Path("~/.cache/dspark_jax/costs")  # where a checkpoint's own folder cannot take them
REPEATS, CALLS, ROUNDS = 3, 4, 8  # the median of chains of calls of some rounds
CONTEXT = 768  # cached rows that a round is measured over, where there is room
PLAIN = -1  # in the place of a tier
MAX_BATCH = 8  # rows that `bench costs` measures up to, unless told otherwise


@entry
def forced_rounds(
    config: ModelConfig,
    params: Params,
    state: DecodeState,
    tier: Int[Array, ""],
    count: Int[Array, ""],
) -> tuple[DecodeState, Int[Array, ""]]:
    """Rounds that all verify one tier's tokens, or that are all plain.

    The number beside the state is there to be waited for: the state goes into the next call.
    """

    def drafted(state: DecodeState) -> tuple[DecodeState, tuple[()]]:
        state, proposal = propose(config, params, state)
        sizes = jnp.asarray(batch_costs(config, state).tokens, jnp.int32)
        even = jnp.ones(proposal.tokens.shape, jnp.float32)
        lengths = fill_tier(even, ~state.done, sizes[tier])
        proposal = replace(proposal, length=lengths)
        return verify_tier(config, params, state, proposal, tier)[0], ()

    def plain(state: DecodeState) -> tuple[DecodeState, tuple[()]]:
        return plain_round(config, params, state)[0], ()

    def step(_: Array, state: DecodeState) -> DecodeState:
        return choose(tier != PLAIN, (plain, drafted), state)[0]

    state = jax.lax.fori_loop(0, count, step, state)
    return state, jnp.sum(state.cached)


def check_schedulable(config: ModelConfig, mesh: Mesh | None) -> None:
    """Raise ValueError where verification cannot be scheduled."""
    draft = config.draft
    if not isinstance(draft, DraftConfig) or draft.confidence == "none":
        lacks = "the draft has no" if isinstance(draft, DraftConfig) else "there is no"
        raise ValueError(
            f"scheduled verification: {lacks} confidence head to go by; name a draft that has one,"
            " or use verification 'fixed'"
        )
    if mesh is not None and mesh.shape[DATA] > 1:
        raise ValueError(
            "scheduled verification packs all rows of a batch, so it cannot split them; leave"
            " data_parallel out"
        )
    if jax.process_count() > 1:  # each would go by times of its own
        raise ValueError("scheduled verification runs in one process; use verification 'fixed'")


def measure_batch(
    config: ModelConfig,
    params: Params,
    batch: int,
    mesh: Mesh | None = None,
    context: int = CONTEXT,
) -> BatchCosts:
    """Microseconds of a round of a batch over `context` rows, or as many as leave room.

    Of a plain round, and of drafted ones with each tier's tokens.
    """
    decoding = config.decode
    sizes = verified_tiers(batch, decoding.step_rows)
    unknown = BatchCosts(batch, 1.0, sizes, (1.0,) * len(sizes), decoding.sampled)
    config = replace(config, decode=replace(decoding, costs=(unknown,), confidence_threshold=0.0))
    cached = _context(config, context)
    rounds = max(1, min(ROUNDS, (decoding.max_length - cached) // decoding.step_rows))
    state = make_state(partial(init_state, config, batch), mesh)
    state = replace(state, limit=jnp.full_like(state.limit, decoding.max_length))
    with use_mesh(mesh):
        lowered = forced_rounds.lower(config, params, state, np.int32(PLAIN), np.int32(rounds))
    run = lowered.compile(compiler_options())

    def send(tier: int) -> Array:
        nonlocal state
        state, ended = run(params, rewind(state, cached), np.int32(tier), np.int32(rounds))
        return ended

    def microseconds(tier: int) -> float:
        times = []
        for _ in range(REPEATS + 1):  # the first warms up
            first, last = send(tier), send(tier)
            jax.block_until_ready(first)
            begin = time.perf_counter()  # the next call begins too, with no wait for its sending
            for _ in range(CALLS - 1):  # as the engine does: sent before the last one has ended
                last = send(tier)
            jax.block_until_ready(last)
            times.append((time.perf_counter() - begin) / (CALLS * rounds) * 1e6)
        return median(times[1:])

    return replace(
        unknown,
        plain=microseconds(PLAIN),
        rounds=tuple(microseconds(tier) for tier in range(len(sizes))),
    )


def _context(config: ModelConfig, wanted: int = CONTEXT) -> int:
    """Cached rows that rounds are measured over."""
    most, added = config.decode.max_length, ROUNDS * config.decode.step_rows
    return min(wanted, max(most - added, most // 2))


def rewind(state: DecodeState, cached: int) -> DecodeState:
    """The same caches with `cached` rows each, of which a full block waits as context.

    In place: every node of a CUDA graph that reads what has moved is set anew before it runs, which
    would be measured with the rounds.
    """
    waiting = min(cached, state.context.tokens.shape[1])  # plain rounds absorb it, once
    return replace(
        state,
        cached=_refilled(state.cached, cached),
        context_len=_refilled(state.context_len, waiting),
        done=_refilled(state.done, False),
    )


def _refilled(old: Array, value: int | bool) -> Array:
    return _filler(old.sharding)(old, value)


@cache
def _filler(sharding: Sharding) -> Callable[[Array, int | bool], Array]:
    return jax.jit(jnp.full_like, donate_argnums=0, keep_unused=True, out_shardings=sharding)


def measure_costs(
    config: ModelConfig,
    params: Params,
    max_batch: int,
    progress: Callable[[BatchCosts], None] = lambda costs: None,
    mesh: Mesh | None = None,
) -> tuple[BatchCosts, ...]:
    """The costs of greedy and of sampled rounds, of each batch size up to `max_batch`."""
    found = []
    for batch in batch_tiers(max_batch):
        for sampled in (False, True):
            own = replace(config, decode=replace(config.decode, sampled=sampled, ceiling=False))
            found.append(measure_batch(own, params, batch, mesh))
            progress(found[-1])
    return tuple(found)


# Files.


def made_for(config: ModelConfig, mesh: Mesh | None = None) -> dict[str, Any]:
    """What the costs depend on."""
    return {
        "device": default_device().device_kind,
        "dtype": config.dtype,
        "implementation": implementation_for(config.dtype, config.decode.implementation),
        "num_drafts": config.decode.num_drafts,
        "context": _context(config),
        "tensor_parallel": mesh.shape[TENSOR] if mesh else 1,
        "pair": config.pair_digest,
    }


def measuring(config: ModelConfig, mesh: Mesh | None = None, max_batch: int = MAX_BATCH) -> str:
    """The command that measures what `read_costs` looks for, and the call that does."""
    decode, draft = config.decode, config.draft_network
    all_room = _context(config) == CONTEXT or decode.max_length == config.target.max_length
    flags = {  # value and default
        "dtype": (config.dtype, default_dtype(default_device().platform)),
        "implementation": (decode.implementation, "auto"),
        "num-speculative-tokens": (decode.num_drafts, draft.max_drafts if draft else 0),
        "max-length": (decode.max_length, decode.max_length if all_room else None),
        "tensor-parallel": (mesh.shape[TENSOR] if mesh else 1, 1),
        "max-batch": (max_batch, MAX_BATCH),
    }
    given = "".join(
        f" --{name} {value}" for name, (value, usual) in flags.items() if value != usual
    )
    return (
        f"python -m bench costs{given} with this run's --target and --draft, or"
        " engine.profile_costs()"
    )


def costs_path(folder: str | Path, config: ModelConfig, mesh: Mesh | None = None) -> Path:
    """The file of a configuration's costs in a folder."""
    digest = hashlib.sha256(json.dumps(made_for(config, mesh)).encode()).hexdigest()[:12]
    return expand(folder) / f"dspark_costs_{digest}.json"


def save_costs(
    costs: Iterable[BatchCosts],
    config: ModelConfig,
    folder: str | Path | None = None,
    mesh: Mesh | None = None,
) -> Path:
    """Write costs into a folder, or into the user's cache where that takes no files.

    Batches that the file holds and `costs` does not stay in it.
    """
    writable = folder is not None and os.access(folder, os.W_OK)
    path = costs_path(folder if folder is not None and writable else FOLDER, config, mesh)
    found = {(one.batch, bool(one.sampled)): one for one in (*_held(path, config, mesh), *costs)}
    tree = {
        "version": VERSION,
        "made_for": made_for(config, mesh),
        "costs": [asdict(found[key]) for key in sorted(found)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return path


def _held(path: Path, config: ModelConfig, mesh: Mesh | None) -> tuple[BatchCosts, ...]:
    try:
        return read_costs(path, config, mesh)
    except ValueError:  # none, or none that is of use
        return ()


def find_costs(
    config: ModelConfig, folder: str | Path | None = None, mesh: Mesh | None = None
) -> Path | None:
    """The file that `save_costs` wrote last for such a configuration; None where there is none."""
    places = [costs_path(place, config, mesh) for place in (folder, FOLDER) if place is not None]
    written = [path for path in places if path.is_file()]
    return max(written, key=lambda path: path.stat().st_mtime_ns, default=None)


def read_costs(
    path: str | Path, config: ModelConfig, mesh: Mesh | None = None, max_batch: int = MAX_BATCH
) -> tuple[BatchCosts, ...]:
    """Read costs; raises ValueError for another file, and for costs of something else.

    The error tells how to measure batches of up to `max_batch` rows.
    """
    remedy = f"measure again with {measuring(config, mesh, max_batch)}"
    tree = read_object(path, remedy)
    try:
        return _table(tree, config, mesh)
    except ValueError as error:
        reason = str(error)
    except KeyError as error:
        reason = f"no cost table, {error} is missing"
    except TypeError:
        reason = "no cost table"
    raise ValueError(f"{path}: {reason}; {remedy}")


def _table(tree: dict[str, Any], config: ModelConfig, mesh: Mesh | None) -> tuple[BatchCosts, ...]:
    if tree["version"] != VERSION:
        raise ValueError(f"version {tree['version']!r}, this program reads {VERSION}")
    stored = tree["made_for"]
    for name, value in made_for(config, mesh).items():
        if stored[name] != value:
            raise ValueError(f"measured for {name} {stored[name]!r}, this run has {value!r}")
    costs = tuple(
        BatchCosts(**one | {"tokens": tuple(one["tokens"]), "rounds": tuple(one["rounds"])})
        for one in tree["costs"]
    )
    known: set[tuple[int, bool]] = set()
    for each in costs:
        most = each.batch * config.decode.step_rows
        if each.tokens[-1] != most:
            raise ValueError(f"batch {each.batch} ends at {each.tokens[-1]} tokens, not {most}")
        kinds = (False, True) if each.sampled is None else (each.sampled,)
        keys = {(each.batch, kind) for kind in kinds}
        if keys & known:
            raise ValueError(f"batch {each.batch} is there twice")
        known |= keys
    return costs
