"""Megatron-LM's checkpoints, read."""
