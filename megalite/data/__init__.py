"""Data: token files, sample indices, blends, samplers and loaders.

Import the module you need; this package imports nothing itself, so that a tokenizer or a file reader costs no torch.
"""
