"""Trackers: who else is told of a run. The record of a run is its folder, with them or without."""
