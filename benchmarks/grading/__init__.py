"""Measure how fast answers are graded, and what grading adds to a step or an evaluation."""
