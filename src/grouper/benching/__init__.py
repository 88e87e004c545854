"""Measuring the steps of a recipe on the machine they will run on."""
