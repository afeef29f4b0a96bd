"""Mixtures of experts: a router decides, tokens are sent to the ranks of their experts, results come back."""
