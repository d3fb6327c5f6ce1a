"""The scheduler and the block bookkeeping: plain Python that never imports mlx."""
