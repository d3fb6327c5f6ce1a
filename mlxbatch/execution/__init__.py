"""Everything that computes with MLX: KV arrays, attention, sampling, the model runner."""
