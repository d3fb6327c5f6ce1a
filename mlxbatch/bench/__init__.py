"""Side-by-side measurements against mlx-lm's own batch generation."""
