"""Building blocks of both networks in flax.nnx; attribute names follow the checkpoint.

Weights keep the checkpoint's [out, in] layout. Modules hold parameters only, never a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dspark_jax.config import LayersConfig, RopeConfig
from dspark_jax.packing import WHOLE, Packing, Whole
from dspark_jax.sharding import CACHE, per_device, spec
from pallas_kernels.block_attention import block_attention
from pallas_kernels.fused_matmul import fused_matmul
from pallas_kernels.projection import project
from pallas_kernels.qkv_write import qkv_write
from pallas_kernels.rotary import normalize_heads as rms_norm

Rope = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]  # cos, sin in float32


class RMSNorm(nnx.Module):
    def __init__(self, width: int, *, eps: float, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        return rms_norm(x, self.weight[...], self.eps)


class Linear(nnx.Module):
    """weight [out, in] and an optional bias [out]."""

    def __init__(self, out_size: int, in_size: int, *, bias: bool = False, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((out_size, in_size), dtype))
        if bias:
            self.bias = nnx.Param(jnp.zeros((out_size,), dtype))

    def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows n"]:
        return self._biased(project(x, self.weight[...]))

    def normed(
        self,
        x: Float[Array, "*rows D"],
        norm: RMSNorm,
        letter: str,
        implementation: str,
        gated: bool = False,
    ) -> Float[Array, "*rows n"]:
        """This projection of `norm(x)`, `silu(gate) * up` where it is gated; `letter` is its out
        axis.

        A named kernel is not insisted on: it is for rows so few that the weight is what costs.
        """
        wanted = "xla" if implementation == "xla" else "auto"
        leading = "B T" if x.ndim == 3 else "-"
        rows, whole, weight = spec(f"{leading} D"), spec("-"), spec(f"{letter} D")
        matmul = per_device(
            partial(fused_matmul, gated=gated, eps=norm.eps, implementation=wanted),
            (rows, whole, weight),
            spec(f"{leading} {letter}"),
        )
        return self._biased(matmul(x, norm.weight[...], self.weight[...]))

    def _biased(self, y: Float[Array, "*rows n"]) -> Float[Array, "*rows n"]:
        return y + self.bias[...] if hasattr(self, "bias") else y


class Embedding(nnx.Module):
    """weight [rows, width], read by id."""

    def __init__(self, rows: int, width: int, *, dtype: Any) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, width), dtype))

    def __call__(self, ids: Int[Array, "*rows"]) -> Float[Array, "*rows d"]:
        return self.weight[...][ids]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [H/2] in float32, as transformers' rope functions compute them."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    inverse = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        return inverse / np.float32(rope.factor)
    if rope.kind == "yarn":
        return _yarn(inverse, rope, head_dim)
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    return inverse


def _yarn(inverse: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        span = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    mixed = inverse / rope.factor * ramp + inverse * (1 - ramp)
    return mixed.astype(np.float32)


def _llama3(inverse: np.ndarray, rope: RopeConfig) -> np.ndarray:
    wavelength = 2 * math.pi / inverse
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = np.where(wavelength > longest, inverse / rope.factor, blended)
    return np.where(wavelength < shortest, inverse, scaled).astype(np.float32)


def rope_table(rope: RopeConfig, head_dim: int, positions: Int[Array, "B T"]) -> Rope:
    """cos and sin [B, T, H/2] of absolute positions, in float32."""
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
    factor = rope.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


class Attention(nnx.Module):
    """Grouped-query attention over a ragged cache, with q, k and v as one projection."""

    def __init__(self, config: LayersConfig, *, dtype: Any) -> None:
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        width = config.hidden_size
        self.config = config
        self.qkv_proj = Linear(
            (heads + 2 * kv_heads) * head_dim, width, bias=config.qkv_bias, dtype=dtype
        )
        self.o_proj = Linear(width, heads * head_dim, bias=config.output_bias, dtype=dtype)
        if config.qk_norm:
            self.q_norm = RMSNorm(head_dim, eps=config.norm_eps, dtype=dtype)
            self.k_norm = RMSNorm(head_dim, eps=config.norm_eps, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "*rows D"],
        norm: RMSNorm,
        rope: Rope,
        k_cache: Float[Array, "B S K H"],
        v_cache: Float[Array, "B S K H"],
        start: Int[Array, " B"],
        packing: Packing | Whole = WHOLE,
        **mask: Any,
    ) -> tuple[Float[Array, "*rows D"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Norm, write the T rows at `start`, attend to all up to them (`mask`: see the op)."""
        config = self.config
        norms: tuple[Any, Any] = (None, None)
        if config.qk_norm:
            norms = (self.q_norm.weight[...], self.k_norm.weight[...])

        def attend(*operands: Any) -> tuple[Array, Array, Array]:
            written = qkv_write(
                *operands, eps=config.norm_eps, implementation=mask["implementation"]
            )
            out = block_attention(*written, operands[-1], **mask)
            return out.reshape(*out.shape[:2], -1), *written[1:]

        rows, cache, slots, whole = spec("B T N"), spec(CACHE), spec("B"), spec("-")
        attend = per_device(
            attend,
            (rows, whole, whole, slots, slots, cache, cache, slots),
            (rows, cache, cache),
        )
        qkv = self.qkv_proj.normed(x, norm, "N", mask["implementation"])
        out, k_cache, v_cache = attend(packing.unpack(qkv), *norms, *rope, k_cache, v_cache, start)
        out = packing.pack(out)
        return self.o_proj(out), k_cache, v_cache


class MLP(nnx.Module):
    """SiLU-gated MLP with gate and up as one projection."""

    def __init__(self, config: LayersConfig, *, dtype: Any) -> None:
        self.gate_up_proj = Linear(2 * config.intermediate_size, config.hidden_size, dtype=dtype)
        self.down_proj = Linear(config.hidden_size, config.intermediate_size, dtype=dtype)

    def __call__(
        self, x: Float[Array, "*rows D"], norm: RMSNorm, implementation: str
    ) -> Float[Array, "*rows D"]:
        return self.down_proj(self.gate_up_proj.normed(x, norm, "F", implementation, gated=True))


class DecoderLayer(nnx.Module):
    def __init__(self, config: LayersConfig, *, dtype: Any) -> None:
        norm = {"eps": config.norm_eps, "dtype": dtype}
        self.input_layernorm = RMSNorm(config.hidden_size, **norm)
        self.self_attn = Attention(config, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "*rows D"],
        rope: Rope,
        k_cache: Float[Array, "B S K H"],
        v_cache: Float[Array, "B S K H"],
        start: Int[Array, " B"],
        packing: Packing | Whole = WHOLE,
        **mask: Any,
    ) -> tuple[Float[Array, "*rows D"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        attended, k_cache, v_cache = self.self_attn(
            x, self.input_layernorm, rope, k_cache, v_cache, start, packing, **mask
        )
        x = x + attended
        x = x + self.mlp(x, self.post_attention_layernorm, mask["implementation"])
        return x, k_cache, v_cache


@lru_cache(maxsize=64)
def _structure(build: Callable[..., nnx.Module], config: Any, dtype: str) -> tuple[Any, Any]:
    """Graph definition and abstract state of a network: built once, allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: build(config, dtype=jnp.dtype(dtype))))


def bind(build: Callable[..., Any], config: Any, dtype: str, params: dict[str, Any]) -> Any:
    """The network `build(config)` over a nested dict of arrays; cheap, meant for inside a jit."""
    graph, abstract = _structure(build, config, dtype)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, _int_keys(params))
    return nnx.merge(graph, state)


def abstract_params(build: Callable[..., Any], config: Any, dtype: str) -> dict[str, Any]:
    """The nested dict that `bind` expects, of `jax.ShapeDtypeStruct`."""
    return _string_keys(nnx.to_pure_dict(_structure(build, config, dtype)[1]))


def _int_keys(tree: Any) -> Any:
    """flax keeps list places as ints; checkpoints and Orbax want strings."""
    if not isinstance(tree, dict):
        return tree
    return {int(k) if k.isdigit() else k: _int_keys(v) for k, v in tree.items()}


def _string_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {str(k): _string_keys(v) for k, v in tree.items()}
