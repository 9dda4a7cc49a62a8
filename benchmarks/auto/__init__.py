"""Whether `AutoStrategy` takes the engine that is fastest, and what its warm-up costs."""
