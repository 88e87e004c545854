"""Measure what a model learns: accuracies over seeds, controls, and other trainers."""
