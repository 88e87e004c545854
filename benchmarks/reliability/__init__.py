"""Show what a run keeps when it is killed, watched or very long."""
