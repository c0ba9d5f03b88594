"""Planning: pure functions from lengths and a pool to a verified plan."""
