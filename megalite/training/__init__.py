"""The training loop, evaluation, metrics, signals."""
