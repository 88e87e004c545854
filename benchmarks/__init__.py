"""Measure what Grouper claims: scripts by subject, each started from the root of the repository."""
