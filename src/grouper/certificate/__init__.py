"""Certificates: what the record of a run proves, in a form that others can check."""
