"""Advice: what a run would take, what is going wrong in it, and what went wrong afterwards."""
