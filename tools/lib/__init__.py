"""What several tools share and nothing else needs."""
