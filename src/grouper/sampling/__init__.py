"""Samplers: the protocol, the native engine, and the shipped fake."""
