"""Kernels for CUDA in Triton; each has a plain twin in PyTorch operations."""
