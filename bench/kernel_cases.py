"""What is measured of each kernel op: how to call it, its operands, its bytes and its error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import block_attention, context_kv, fused_matmul, markov_walk, qkv_write

SAMPLED_HEADS = 6  # of a batch, whose attention is checked


@dataclass
class Case:
    """One measurement to make."""

    op: str
    shape: dict[str, Any]
    call: Callable[[Any], Any]  # of one operand set
    draw: Callable[[], Any]  # an operand set
    check: Callable[[Any, Any], float]  # error, from a set and what the call made of it
    moved: int  # bytes
    in_place: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


@cache
def _noise() -> np.ndarray:
    """Draw numbers once: operands are cut from them at random places."""
    return np.random.default_rng(0).standard_normal(2**24).astype(ml_dtypes.bfloat16)


def draw(*shape: int) -> Any:
    """Put random bfloat16 numbers of a shape on the device."""
    noise, count = _noise(), math.prod(shape)
    start = int(np.random.default_rng().integers(noise.size))
    return jnp.asarray(np.resize(np.roll(noise, -start) if count < noise.size else noise, shape))


def _angles(batch: int, rows: int, width: int) -> tuple[Any, Any]:
    angle = np.random.default_rng(1).uniform(-9, 9, (batch, rows, width // 2))
    return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


def attention_error(operands: Any, out: Any, *, causal: bool, window: int) -> float:
    """Largest error over the largest value, on some heads of some batch rows, in float64."""
    q, k, v, start = operands
    batch, rows, heads, width = q.shape
    group = heads // k.shape[2]
    rng = np.random.default_rng(2)
    worst = largest = 0.0
    for _ in range(SAMPLED_HEADS):
        b, n = int(rng.integers(batch)), int(rng.integers(heads))
        begin = int(start[b])
        query, actual = (np.asarray(x[b, :, n], np.float64) for x in (q, out))
        keys, values = (np.asarray(x[b, : begin + rows, n // group], np.float64) for x in (k, v))
        position = begin + np.arange(rows)[:, None]
        key = np.arange(begin + rows)
        seen = key <= position if causal else key < begin + rows
        if window:
            seen = seen & (key > position - window)
        scores = np.where(seen, query @ keys.T / np.sqrt(width), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weights @ values / weights.sum(axis=1, keepdims=True)
        worst = max(worst, float(np.abs(actual - expected).max()))
        largest = max(largest, float(np.abs(expected).max()))
    return worst / largest


def attention_case(
    spec: block_attention.Spec, implementation: str, *, config: Any = None, starts: Any = None
) -> Case:
    """Attention over `spec.cached` rows, or over the uneven `starts`."""
    starts = np.full(spec.batch, spec.cached) if starts is None else np.asarray(starts)
    cache_rows = -(-(int(starts.max()) + spec.rows) // 64) * 64
    cache_shape = (spec.batch, cache_rows, spec.kv_heads, spec.head_dim)
    mask: dict[str, Any] = {"causal": spec.causal, "window": spec.window}
    op = partial(block_attention.block_attention, implementation=implementation, **mask)
    function = jax.jit(op if config is None else partial(op, config=config))
    seen = starts + spec.rows
    if spec.window:
        seen = np.minimum(seen, spec.window + spec.rows)
    row_bytes = 2 * spec.kv_heads * spec.head_dim * 2
    ends = 2 * 2 * spec.batch * spec.rows * spec.heads * spec.head_dim
    return Case(
        op="block_attention",
        shape={**asdict(spec), "cached": spec.cached, "total": int(seen.sum())},
        call=lambda x: function(*x),
        draw=lambda: (
            draw(spec.batch, spec.rows, spec.heads, spec.head_dim),
            draw(*cache_shape),
            draw(*cache_shape),
            jnp.asarray(starts, jnp.int32),
        ),
        check=partial(attention_error, **mask),
        moved=int(seen.sum()) * row_bytes + ends,
    )


def _turned(x: np.ndarray, norm: Any, cos: Any, sin: Any) -> np.ndarray:
    if norm is not None:
        scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)
        x = x / scale * np.asarray(norm, np.float64)
    low, high = np.split(x, 2, axis=-1)
    cos, sin = (np.asarray(a, np.float64)[:, :, None] for a in (cos, sin))
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _written_error(written: Any, expected: np.ndarray, start: Any) -> float:
    """Compare the rows of a cache that a step wrote."""
    rows = expected.shape[1]
    actual = np.stack(
        [np.asarray(written[b, int(s) : int(s) + rows], np.float64) for b, s in enumerate(start)]
    )
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def qkv_case(spec: qkv_write.Spec, implementation: str, *, config: Any = None) -> Case:
    """One layer's rows, in place."""
    total = spec.heads + 2 * spec.kv_heads
    cache_shape = (spec.batch, spec.cache_rows, spec.kv_heads, spec.head_dim)
    options: dict[str, Any] = {} if config is None else {"config": config}
    function = jax.jit(
        partial(qkv_write.qkv_write, implementation=implementation, **options),
        donate_argnums=(5, 6),
    )

    def check(before: Any, after: Any) -> float:
        x, q_norm, k_norm, cos, sin, *_, start = before
        q = after["q"]
        k_cache, v_cache = after["operands"][5:7]
        heads = np.asarray(x, np.float64).reshape(spec.batch, spec.rows, total, spec.head_dim)
        wide = [spec.heads, spec.heads + spec.kv_heads]
        query, key, value = np.split(heads, wide, axis=2)
        query = _turned(query, q_norm, cos, sin)
        return max(
            float(np.abs(np.asarray(q, np.float64) - query).max() / np.abs(query).max()),
            _written_error(k_cache, _turned(key, k_norm, cos, sin), start),
            _written_error(v_cache, value, start),
        )

    def call(operands: Any) -> Any:
        operands = operands["operands"]
        q, k_cache, v_cache = function(*operands)
        return {"operands": (*operands[:5], k_cache, v_cache, operands[7]), "q": q}

    def make() -> Any:
        norm = draw(spec.head_dim) if spec.norm else None
        x = draw(spec.batch, spec.rows, total * spec.head_dim)
        start = jnp.full(spec.batch, spec.cache_rows - spec.rows - 5, jnp.int32)
        caches = draw(*cache_shape), draw(*cache_shape)
        angles = _angles(spec.batch, spec.rows, spec.head_dim)
        return {"operands": (x, norm, norm, *angles, *caches, start)}

    return Case(
        op="qkv_write",
        shape=asdict(spec),
        call=call,
        draw=make,
        check=lambda before, after: check(before["operands"], after),
        moved=2 * 2 * spec.batch * spec.rows * total * spec.head_dim,
        in_place=True,
    )


def context_case(spec: context_kv.Spec, implementation: str, *, config: Any = None) -> Case:
    """All draft layers' context rows, in place."""
    wide = spec.layers * 2 * spec.kv_heads * spec.head_dim
    cache_shape = (spec.batch, spec.cache_rows, spec.kv_heads, spec.head_dim)
    options: dict[str, Any] = {} if config is None else {"config": config}
    function = jax.jit(
        partial(context_kv.context_kv, implementation=implementation, **options),
        donate_argnums=(4, 5),
    )

    def call(operands: Any) -> Any:
        k_caches, v_caches = function(*operands)
        return (*operands[:4], k_caches, v_caches, *operands[6:])

    def check(before: Any, after: Any) -> float:
        x, norms, cos, sin, *_, start, _ = before
        shape = (spec.batch, spec.rows, spec.layers, 2, spec.kv_heads, spec.head_dim)
        heads = np.asarray(x, np.float64).reshape(shape)
        errors = []
        for i, (k_cache, v_cache) in enumerate(zip(after[4], after[5], strict=True)):
            norm = None if norms is None else norms[i]
            key = _turned(heads[:, :, i, 0], norm, cos, sin)
            errors.append(_written_error(k_cache, key, start))
            errors.append(_written_error(v_cache, heads[:, :, i, 1], start))
        return max(errors)

    def make() -> Any:
        caches = [[draw(*cache_shape) for _ in range(spec.layers)] for _ in range(2)]
        counts = jnp.full(spec.batch, spec.rows, jnp.int32)
        return (
            draw(spec.batch, spec.rows, wide),
            draw(spec.layers, spec.head_dim) if spec.norm else None,
            *_angles(spec.batch, spec.rows, spec.head_dim),
            *caches,
            counts + (spec.cache_rows - 2 * spec.rows),
            counts,
        )

    return Case(
        op="context_kv",
        shape=asdict(spec),
        call=call,
        draw=make,
        check=check,
        moved=2 * 2 * spec.batch * spec.rows * wide,
        in_place=True,
    )


def walk_case(spec: markov_walk.Spec, implementation: str, *, config: Any = None) -> Case:
    """All slots of a block, with the noise drawn before or without any."""
    shape = (spec.batch, spec.slots, spec.vocabulary)
    options: dict[str, Any] = {} if config is None else {"config": config}
    op = partial(markov_walk.markov_walk, implementation=implementation, **options)
    function = jax.jit(op, donate_argnums=(0,))

    def call(operands: Any) -> Any:
        tokens, logits = function(*operands["operands"])
        return {"operands": (logits, *operands["operands"][1:]), "tokens": tokens}

    def check(before: Any, after: Any) -> float:
        """Follow the tokens that were drawn: a slot's logits stand against float64."""
        base, w1, w2, anchor, *_ = before["operands"]
        head, tokens = np.asarray(w2, np.float64), np.asarray(after["tokens"])
        worst = largest = 0.0
        for b in range(min(spec.batch, 2)):
            for slot in range(spec.slots):
                previous = tokens[b, slot - 1] if slot else anchor[b]
                row = np.asarray(w1[int(previous)], np.float64)
                expected = np.asarray(base[b, slot], np.float64) + head @ row
                actual = np.asarray(after["operands"][0][b, slot], np.float64)
                worst = max(worst, float(np.abs(actual - expected).max()))
                largest = max(largest, float(np.abs(expected).max()))
        return worst / largest

    def make() -> Any:
        base = draw(*shape).astype(jnp.float32)
        head = draw(spec.vocabulary, spec.rank), draw(spec.vocabulary, spec.rank) / spec.rank**0.5
        anchor = jnp.arange(spec.batch, dtype=jnp.int32) + 7
        if not spec.noise:
            return {"operands": (base, *head, anchor)}
        noise = jax.random.gumbel(jax.random.key(0), shape, jnp.float32)
        return {"operands": (base, *head, anchor, noise, jnp.ones(spec.batch))}

    streams = 3 if spec.noise else 2  # base in, logits out, noise in
    return Case(
        op="markov_walk",
        shape=asdict(spec),
        call=call,
        draw=make,
        check=check,
        moved=spec.slots * spec.vocabulary * (2 * spec.rank + 4 * streams * spec.batch),
        in_place=True,
    )


def matmul_case(spec: fused_matmul.Spec, implementation: str, *, config: Any = None) -> Case:
    """A norm and a projection, gated or not."""
    options: dict[str, Any] = {} if config is None else {"config": config}
    op = partial(
        fused_matmul.fused_matmul, gated=spec.gated, implementation=implementation, **options
    )
    function = jax.jit(op)

    def check(operands: Any, y: Any) -> float:
        x, norm, weight = (np.asarray(a, np.float64) for a in operands)
        x = (x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)) * norm
        expected = x @ weight.T
        if spec.gated:
            gate, up = np.split(expected, 2, axis=-1)
            expected = gate / (1 + np.exp(-gate)) * up
        return float(np.abs(np.asarray(y, np.float64) - expected).max() / np.abs(expected).max())

    def make() -> Any:
        weight = draw(spec.out, spec.width) / spec.width**0.5
        return draw(spec.rows, spec.width), draw(spec.width), weight

    wide = spec.out // 2 if spec.gated else spec.out
    return Case(
        op="fused_matmul",
        shape={"m": spec.rows, "k": spec.width, "n": spec.out, "gated": spec.gated},
        call=lambda x: function(*x),
        draw=make,
        check=check,
        moved=2 * (spec.out * spec.width + spec.rows * (spec.width + wide)),
    )


def uneven_starts(batch: int, total: int) -> np.ndarray:
    """Split `total` cached rows unevenly: one row has half of them, the rest share in steps."""
    weights = np.arange(1, batch, dtype=float)
    rest = np.floor(total / 2 * weights / weights.sum()).astype(int)
    return np.concatenate([[total - int(rest.sum())], rest])


def cases(ops: tuple[str, ...], implementations: tuple[str, ...]) -> Iterator[tuple[str, Case]]:
    """Yield every measurement, with the implementation's name."""
    for implementation in implementations:
        if "block_attention" in ops:
            for spec in block_attention.SPECS:
                yield implementation, attention_case(spec, implementation)
            for total in (32 * 2048, 32 * 512):
                spec = block_attention.Spec(32, 8, total // 32)
                case = attention_case(spec, implementation, starts=uneven_starts(32, total))
                case.shape["uneven"] = True
                yield implementation, case
        if "qkv_write" in ops:
            for qkv_spec in qkv_write.SPECS:
                yield implementation, qkv_case(qkv_spec, implementation)
        if "context_kv" in ops:
            for context_spec in context_kv.SPECS:
                yield implementation, context_case(context_spec, implementation)
        if "markov_walk" in ops:
            for walk_spec in markov_walk.SPECS:
                yield implementation, walk_case(walk_spec, implementation)
        if "fused_matmul" in ops:
            for matmul_spec in fused_matmul.SPECS:
                yield implementation, matmul_case(matmul_spec, implementation)
