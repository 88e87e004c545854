"""Programs that a model writes: run in isolated processes, never in our own."""
