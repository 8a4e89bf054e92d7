"""Hugging Face checkpoints in every published packaging -> parameters and an Orbax store."""

from convert.problems import CheckpointError

__all__ = ["CheckpointError"]
