"""Configuration: dataclasses, flags made from them, presets, checks. Imports neither torch nor numpy."""
