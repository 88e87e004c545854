"""Compare what the sampler draws with what the trainer, transformers and other engines compute."""
