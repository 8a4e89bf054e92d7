"""What the processes of one run must agree on; all of them make the same calls in one order."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

import jax
import numpy as np


def seed_source() -> Callable[[], int]:
    """Return what draws seeds of 64 bits: of several processes all draw those of the first."""
    if jax.process_count() == 1:
        return lambda: secrets.randbits(64)
    from jax.experimental.multihost_utils import broadcast_one_to_all

    words = np.frombuffer(secrets.token_bytes(8), np.uint32)
    high, low = broadcast_one_to_all(words).tolist()
    drawn = random.Random(high << 32 | low)
    return lambda: drawn.getrandbits(64)
