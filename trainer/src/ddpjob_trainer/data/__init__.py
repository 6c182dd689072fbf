"""Which samples a step trains on (sampler), and how a rank gets them (fetch)."""
