"""Grouper trains small language models to solve maths problems, and says honestly how well."""
