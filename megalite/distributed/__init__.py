"""Ranks, groups, collectives, parameters' places, random numbers as a function, launch and teardown."""
