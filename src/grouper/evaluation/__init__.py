"""Measuring a model: sampling held-out problems, grading them, and saying what changed."""
