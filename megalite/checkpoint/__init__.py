"""Checkpoints: sharded save and load in global coordinates, tracker, retention."""
