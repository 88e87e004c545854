"""Kernels compiled from C++ on first use; each has a plain twin in PyTorch operations."""
