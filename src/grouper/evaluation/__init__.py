"""Evaluation of a model: sampling held-out problems, grading them, and comparing results."""
