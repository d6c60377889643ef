"""What a cache format costs a model: caches simulated in transformers, without an engine."""
