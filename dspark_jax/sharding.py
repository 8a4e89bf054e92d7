"""How parameters and state lie on a mesh of devices: one table by axis letter.

The mesh has two axes. `tensor` splits heads, MLP width and vocabulary, `data` splits slots; what
is between is left to XLA's SPMD partitioner. While a program is traced its mesh is jax's own
context (`jax.set_mesh`); without one everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from dspark_jax.config import DraftConfig, LayersConfig, ModelConfig
from dspark_jax.state import DecodeState, KVCache, Proposal
from pallas_kernels.platform import decide_for

DATA, TENSOR = "data", "tensor"
AXES = {"B": DATA, "N": TENSOR, "K": TENSOR, "F": TENSOR, "V": TENSOR, "?": P.UNCONSTRAINED}

# Parameters that are split, by the end of their module's name; all others are whole on every
# device (norms, fc, Markov and confidence heads, as in the reference). The first word names the
# parts that are stacked in the rows, over and over: N and K count heads, and each device holds
# its own heads of every part.
TABLE = (
    ("self_attn.qkv_proj", "NKK D"),
    ("self_attn.o_proj", "D N"),
    ("mlp.gate_up_proj", "FF D"),
    ("mlp.down_proj", "D F"),
    ("context_kv", "KK D"),
    ("embed_tokens", "V D"),
    ("lm_head", "V D"),
)
CACHE = "B S K H"


def spec(letters: str) -> P:
    """The partition of an array by its axis letters; a word of several is split as its first."""
    return P(*(AXES.get(word[0]) for word in letters.split()))


# What is decided before a program is traced.


def make_mesh(tensor: int, data: int) -> Mesh | None:
    """A mesh of the first tensor x data devices; None where one device is enough.

    Raises ValueError where there are fewer devices, or where processes would be left without.
    """
    devices, count = jax.devices(), tensor * data
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        rule = "" if jax.process_count() == 1 else "; several processes use all of them"
        raise ValueError(
            f"tensor_parallel {tensor} x data_parallel {data} need {count} devices, found"
            f" {len(devices)}{rule}"
        )
    if count == 1:
        return None
    return Mesh(np.array(devices[:count]).reshape(data, tensor), (DATA, TENSOR))


def adopt_mesh(mesh: Mesh) -> Mesh:
    """A caller's mesh, its axes left to the partitioner.

    Raises ValueError without the two names, or where processes would be left without a device.
    """
    if set(mesh.axis_names) != {DATA, TENSOR}:
        raise ValueError(f"mesh must have the axes {DATA} and {TENSOR}, got {mesh.axis_names}")
    holders = {device.process_index for device in mesh.devices.flat}
    if len(holders) < jax.process_count():
        raise ValueError(
            f"mesh must hold devices of all {jax.process_count()} processes, got those of"
            f" {len(holders)}: every process makes the same calls"
        )
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * 2)


def check_divisible(config: ModelConfig, max_batch: int, mesh: Mesh) -> None:
    """Raise ValueError with the numbers where a size does not divide over its mesh axis."""
    tensor, data = mesh.shape[TENSOR], mesh.shape[DATA]
    sizes = _sizes("the target", config.target.layers)
    sizes += [("vocabulary", config.target.vocab_size)]
    if network := config.draft_network:
        sizes += _sizes("the draft", network.layers)
        sizes += [("draft vocabulary", network.draft_vocab_size)] if network.own_head else []
    uneven = [f"{name} {size}" for name, size in sizes if size % tensor]
    if uneven:
        raise ValueError(f"tensor_parallel {tensor} does not divide {', '.join(uneven)}")
    if max_batch % data:
        raise ValueError(f"data_parallel {data} does not divide max_batch {max_batch}")


def _sizes(owner: str, layers: LayersConfig) -> list[tuple[str, int]]:
    return [
        (f"query heads of {owner}", layers.num_heads),
        (f"key heads of {owner}", layers.num_kv_heads),
        (f"MLP width of {owner}", layers.intermediate_size),
    ]


def device_share(config: ModelConfig, max_batch: int, mesh: Mesh | None) -> tuple[ModelConfig, int]:
    """What one device of a mesh runs: its heads and MLP columns, and its slots."""
    if mesh is None:
        return config, max_batch

    def share(network: Any) -> Any:
        layers, tensor = network.layers, mesh.shape[TENSOR]
        part = {
            name: getattr(layers, name) // tensor
            for name in ("num_heads", "num_kv_heads", "intermediate_size")
        }
        return replace(network, layers=replace(layers, **part))

    draft = share(config.draft) if isinstance(config.draft, DraftConfig) else config.draft
    config = replace(config, target=share(config.target), draft=draft)
    return config, max_batch // mesh.shape[DATA]


# Parameters.


def letters_of(name: str, rank: int) -> str:
    """The letters of a parameter of `rank` axes; "-" is an axis that stays whole."""
    module, _, _ = name.rpartition(".")
    for ending, letters in TABLE:
        if module == ending or module.endswith("." + ending):
            return " ".join(letters.split()[:rank])
    return " ".join("-" * rank)


def param_sharding(name: str, rank: int, mesh: Mesh) -> NamedSharding:
    """The sharding of one parameter by its dotted name."""
    return NamedSharding(mesh, spec(letters_of(name, rank)))


def param_shardings(params: Any, mesh: Mesh) -> Any:
    """The sharding of every leaf of one network's parameters, or of a tree of networks."""

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        return param_sharding(_dotted(path), len(leaf.shape), mesh)

    return jax.tree_util.tree_map_with_path(sharding, params)


def arrange(name: str, value: Array, layers: LayersConfig) -> Array:
    """Reorder stacked rows so that the equal parts of the rows are what each device is to hold.

    `value` lies as a checkpoint stacks it (all of q, then all of k, then all of v), sharded as it
    will stay; the result has q, k and v of the first device's heads, then of the second's.
    """
    parts = letters_of(name, value.ndim).split()[0]
    if len(parts) == 1:
        return value
    rows = {"N": layers.num_heads * layers.head_dim, "K": layers.num_kv_heads * layers.head_dim}
    sizes = [rows.get(part, layers.intermediate_size) for part in parts]
    sizes *= value.shape[0] // sum(sizes)
    place = value.sharding
    assert isinstance(place, NamedSharding)
    interleave = jax.jit(_interleave, static_argnums=(1, 2), out_shardings=place)
    return interleave(value, tuple(sizes), place.mesh.shape[TENSOR])


def _interleave(value: Float[Array, P * D], sizes: tuple[int, ...], count: int) -> Array:
    bounds = np.cumsum(sizes)[:-1].tolist()
    parts = [part.reshape(count, -1, *part.shape[1:]) for part in jnp.split(value, bounds)]
    return jnp.concatenate(parts, axis=1).reshape(value.shape)


def place_param(mesh: Mesh, layers: LayersConfig, name: str, value: np.ndarray) -> Array:
    """One parameter from the host, as a checkpoint stacks it, to its place on the mesh."""
    sharding = param_sharding(name, value.ndim, mesh)
    placed = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return arrange(name, placed, layers)


def arrange_params(params: Any, layers: LayersConfig) -> Any:
    """`arrange` over one network's parameters."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: arrange(_dotted(path), x, layers), params
    )


def _dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


# State.


def state_specs(state: Any) -> Any:
    """Partitions of a state, or of any tree of [B, ...] arrays and caches."""

    def specs(part: Any) -> Any:
        letters = CACHE if isinstance(part, KVCache) else "B"
        # jax keeps what holds no element whole, whatever is asked
        return jax.tree.map(lambda x: spec(letters) if x.size and x.ndim else P(), part)

    return jax.tree.map(specs, state, is_leaf=lambda part: isinstance(part, KVCache))


def abstract_state(build: Callable[[], Any], mesh: Mesh | None) -> Any:
    """Shapes of the state that `build` makes, on a mesh with their shardings."""
    state = jax.eval_shape(build)
    if mesh is None:
        return state
    return jax.tree.map(
        lambda x, part: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, part)),
        state,
        state_specs(state),
    )


def state_maker(build: Callable[[], Any], mesh: Mesh | None) -> Any:
    """`build` as a jitted function whose state is born in its places."""
    places = None
    if mesh is not None:
        places = jax.tree.map(lambda x: x.sharding, abstract_state(build, mesh))
    return jax.jit(build, out_shardings=places)


def make_state(build: Callable[[], Any], mesh: Mesh | None) -> Any:
    """The state that `build` makes, born in its places."""
    return build() if mesh is None else state_maker(build, mesh)()


# Inside a traced program.


@contextmanager
def use_mesh(mesh: Mesh | None) -> Iterator[None]:
    """The context in which programs for a mesh are traced; kernels are chosen for its devices."""
    if mesh is None:
        yield
    else:
        with jax.set_mesh(mesh), decide_for(mesh.devices.flat[0]):
            yield


def axis_size(axis: str) -> int:
    """Devices along an axis of the mesh that a program is traced for; 1 without one."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def on_mesh() -> bool:
    return {DATA, TENSOR} <= set(jax.sharding.get_abstract_mesh().axis_names)


def constrain(x: Array, letters: str) -> Array:
    """`x` split as its letters say, whole over all other axes; a "?" leaves an axis open."""
    return jax.lax.with_sharding_constraint(x, spec(letters)) if on_mesh() else x


def gather_logits(logits: Array) -> Array:
    """Whole rows of logits on every device that holds their slots.

    They are split first: else the partitioner may gather the head in their place.
    """
    return constrain(constrain(logits, "B T V"), "B T -")


def per_device(function: Callable[..., Any], in_specs: Sequence[Any], out_specs: Any) -> Any:
    """`function` on each device's own parts of its operands, nothing moved between devices."""
    if not on_mesh():
        return function
    return jax.shard_map(function, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)


def settle(outputs: Any) -> Any:
    """Results of an entry point: state and proposal in their places, the rest for every host."""
    if not on_mesh():
        return outputs

    def settled(part: Any) -> Any:
        stays = isinstance(part, DecodeState | Proposal)
        specs = state_specs(part) if stays else jax.tree.map(lambda _: P(), part)
        return jax.lax.with_sharding_constraint(part, specs)

    return tuple(map(settled, outputs)) if isinstance(outputs, tuple) else settled(outputs)
