"""One of several things to do, chosen on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

IN_PLACE = jax.__version_info__ >= (0, 11)  # XLA writes to what passes through a conditional


def choose(
    index: Int[Array, ""] | Bool[Array, ""],
    branches: Sequence[Callable[[Any], tuple[Any, Any]]],
    carried: Any,
) -> tuple[Any, Any]:
    """`branches[index](carried)`: what was carried, written in place, and an output.

    Every branch returns a pytree like `carried`, and outputs of the same shapes. Earlier XLA copies
    an array that passes through a conditional and is written in it, all of it in every branch. A
    loop does not, so there each branch is a loop of one turn, or of none.
    """
    index = index.astype(jnp.int32)
    if IN_PLACE or len(branches) == 1:
        return jax.lax.switch(index, branches, carried)
    shapes = jax.eval_shape(branches[0], carried)[1]
    output = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    for number, branch in enumerate(branches):

        def turn(loop: tuple[Array, Any, Any], branch: Any = branch) -> tuple[Array, Any, Any]:
            return jnp.int32(0), *branch(loop[1])

        # Turns left, not a flag: in a CUDA graph a condition that computes nothing is read before
        # what it depends on is written.
        start = ((index == number).astype(jnp.int32), carried, output)
        _, carried, output = jax.lax.while_loop(lambda loop: loop[0] > 0, turn, start)
    return carried, output
