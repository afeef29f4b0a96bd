"""Hugging Face folders in and out: `families.py` lists the architectures."""
