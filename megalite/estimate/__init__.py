"""Formulas: parameters, FLOPs, bytes. Pure arithmetic on the configuration."""
