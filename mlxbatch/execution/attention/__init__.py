"""Paged attention behind one signature: `reference` (plain MLX operations) and `metal` (our kernels)."""
