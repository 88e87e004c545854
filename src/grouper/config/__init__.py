"""The recipe: what it may say, how it is read, and what its names stand for."""
