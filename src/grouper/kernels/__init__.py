"""Fused kernels: C++ for the CPU, Triton for CUDA; everything works without them."""
