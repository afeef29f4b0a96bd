"""Hugging Face folders in and out: one table per architecture, in its own file; `registry.py` lists them."""
