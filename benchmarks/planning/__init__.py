"""Compute what a model needs before it runs: memory, hours and arithmetic."""
