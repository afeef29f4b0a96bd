"""Contiguous buffers, fused optimizers, the gradient norm, learning-rate schedules."""
