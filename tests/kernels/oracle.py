"""The kernels' ops in float64 numpy, one element at a time, and operands to try them on."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

POISON = 1e4  # what garbage rows hold


def exact(array: Any) -> np.ndarray:
    return np.asarray(array, np.float64)


def relative_error(actual: Any, expected: np.ndarray) -> float:
    """Largest deviation over the largest value."""
    return float(np.abs(exact(actual) - expected).max() / np.abs(expected).max())


def attention(q: Any, k: Any, v: Any, start: Any, *, causal: bool, window: int = 0) -> np.ndarray:
    q, k, v = exact(q), exact(k), exact(v)
    batch, rows, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        for t in range(rows):
            position = int(start[b]) + t
            end = position + 1 if causal else int(start[b]) + rows
            begin = max(0, position - window + 1) if window else 0
            for n in range(heads):
                scores = k[b, begin:end, n // group] @ q[b, t, n] / np.sqrt(width)
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights / weights.sum() @ v[b, begin:end, n // group]
    return out


def attention_operands(
    rng: np.random.Generator,
    shape: tuple[int, ...],
    kv_heads: int,
    cache_rows: int,
    start: Any,
    dtype: Any = jnp.bfloat16,
) -> tuple[Any, Any, Any, Any]:
    """Draw queries and caches; every cache row past a batch row's block is poisoned."""
    batch, rows, _, width = shape
    cache = (batch, cache_rows, kv_heads, width)
    q, k, v = (rng.standard_normal(s) for s in (shape, cache, cache))
    for b in range(batch):
        k[b, int(start[b]) + rows :] = POISON
        v[b, int(start[b]) + rows :] = -POISON
    operands = (jnp.asarray(x, dtype) for x in (q, k, v))
    return *operands, jnp.asarray(start, jnp.int32)


def turned(head: np.ndarray, weight: Any, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RMSNorm one head (unless there is no weight), then rotate its halves."""
    if weight is not None:
        head = head / np.sqrt((head * head).mean() + 1e-6) * exact(weight)
    low, high = np.split(head, 2)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin])


def qkv_write(
    qkv: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, start: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    k_out, v_out, cos, sin = exact(k_cache).copy(), exact(v_cache).copy(), exact(cos), exact(sin)
    batch, cache_rows, kv_heads, width = k_out.shape
    rows = exact(qkv).reshape(batch, qkv.shape[1], -1, width)
    heads = rows.shape[2] - 2 * kv_heads
    q = np.zeros((batch, rows.shape[1], heads, width))
    for b in range(batch):
        for t in range(rows.shape[1]):
            angles = cos[b, t], sin[b, t]
            q[b, t] = [turned(rows[b, t, n], q_norm, *angles) for n in range(heads)]
            if (row := int(start[b]) + t) < cache_rows:
                keys = rows[b, t, heads : heads + kv_heads]
                k_out[b, row] = [turned(key, k_norm, *angles) for key in keys]
                v_out[b, row] = rows[b, t, heads + kv_heads :]
    return q, k_out, v_out


def context_kv(
    kv: Any, k_norms: Any, cos: Any, sin: Any, k_caches: Any, v_caches: Any, start: Any, count: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    k_out, v_out = ([exact(c).copy() for c in caches] for caches in (k_caches, v_caches))
    cos, sin = exact(cos), exact(sin)
    batch, _, kv_heads, width = k_out[0].shape
    rows = exact(kv).reshape(batch, kv.shape[1], len(k_out), 2, kv_heads, width)
    for layer in range(len(k_out)):
        weight = None if k_norms is None else k_norms[layer]
        for b in range(batch):
            for t in range(int(count[b])):
                row, angles = int(start[b]) + t, (cos[b, t], sin[b, t])
                keys = rows[b, t, layer, 0]
                k_out[layer][b, row] = [turned(key, weight, *angles) for key in keys]
                v_out[layer][b, row] = rows[b, t, layer, 1]
    return k_out, v_out


def head_operands(
    rng: np.random.Generator,
    batch: int,
    rows: int,
    heads: int,
    cache: tuple[int, ...],
    dtype: Any = jnp.bfloat16,
) -> dict[str, Any]:
    """Draw a projection `heads` wide, norm weights, angles and one cache."""
    width = cache[-1]
    angle = rng.uniform(-9, 9, (batch, rows, width // 2))
    drawn = {
        "x": rng.standard_normal((batch, rows, heads * width)),
        "norm": rng.uniform(0.5, 1.5, width),
        "k_cache": rng.standard_normal((batch, *cache)),
        "v_cache": rng.standard_normal((batch, *cache)),
    }
    operands: dict[str, Any] = {name: jnp.asarray(x, dtype) for name, x in drawn.items()}
    cos, sin = (jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    return {**operands, "cos": cos, "sin": sin}


def markov_walk(
    base: Any, w1: Any, w2: Any, anchor: Any, noise: Any = None, scale: Any = None
) -> tuple[np.ndarray, np.ndarray, float]:
    """Tokens, corrected logits, and the least margin by which a token won."""
    logits, w1, w2 = exact(base).copy(), exact(w1), exact(w2)
    batch, slots, _ = logits.shape
    tokens, margin = np.zeros((batch, slots), int), np.inf
    for b in range(batch):
        previous = int(anchor[b])
        for slot in range(slots):
            logits[b, slot] += w2 @ w1[previous]
            score = logits[b, slot]
            if noise is not None:
                score = score * float(scale[b]) + exact(noise[b, slot])
            tokens[b, slot] = previous = int(score.argmax())
            second, first = np.sort(score)[-2:]
            margin = min(margin, float(first - second))
    return tokens, logits, margin


def walk_operands(
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    rank: int,
    *,
    noise: bool,
    dtype: Any = jnp.bfloat16,
) -> tuple[Any, ...]:
    """Draw base logits, both matrices and the anchor; with noise also Gumbel noise and scales."""
    batch, _, vocabulary = shape
    base = jnp.asarray(2 * rng.standard_normal(shape), jnp.float32)
    w1 = jnp.asarray(rng.standard_normal((vocabulary, rank)), dtype)
    w2 = jnp.asarray(rng.standard_normal((vocabulary, rank)) / rank**0.5, dtype)
    anchor = jnp.asarray(rng.integers(vocabulary, size=batch), jnp.int32)
    if not noise:
        return base, w1, w2, anchor
    gumbel = jnp.asarray(rng.gumbel(size=shape), jnp.float32)
    return base, w1, w2, anchor, gumbel, jnp.asarray(rng.uniform(0.5, 2, batch), jnp.float32)


def fused_matmul(x: Any, norm: Any, weight: Any, *, gated: bool) -> np.ndarray:
    x, norm, weight = exact(x), exact(norm), exact(weight)
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * norm @ weight.T
    if not gated:
        return y
    gate, up = np.split(y, 2, axis=-1)
    return gate / (1 + np.exp(-gate)) * up


def matmul_operands(
    rng: np.random.Generator, shape: tuple[int, ...], out: int, dtype: Any = jnp.bfloat16
) -> tuple[Any, Any, Any]:
    width = shape[-1]
    drawn = (shape, (width,), (out, width))
    x, norm, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in drawn)
    return x, norm, weight / width**0.5
