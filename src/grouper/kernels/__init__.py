"""Fused kernels for the CPU, compiled on first use; everything works without them."""
