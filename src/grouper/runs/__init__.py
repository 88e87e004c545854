"""The record of a run: files that are always written, and what a person sees meanwhile."""
