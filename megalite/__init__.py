"""megalite: a Megatron-style training framework that one person can read."""

__version__ = "0.1.0"
