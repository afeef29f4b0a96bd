"""Sharded building blocks: each knows its parameters' places (`ParamSpec`) and treats one rank as the plain case."""
