"""Pure tensor math of the algorithms: advantages, losses, weightings. No I/O, no config."""
