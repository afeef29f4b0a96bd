"""Models built from the blocks of `nn`, and which layers a pipeline stage owns."""
