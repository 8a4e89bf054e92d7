"""DSpark speculative decoding in JAX: public names, resolved on first use."""

from importlib import import_module
from typing import Any

from dspark_jax.shadow import refuse_shadows

refuse_shadows("pallas_kernels")  # everything that computes imports it

_HOMES = {
    "load": "dspark_jax.loading",
    "load_exported": "dspark_jax.exported",
    "Engine": "dspark_jax.engine",
    "Request": "dspark_jax.accounting",
    "Result": "dspark_jax.request",
    "Chunk": "dspark_jax.request",
    "SamplingParams": "dspark_jax.request",
}

__all__ = list(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dspark_jax' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
