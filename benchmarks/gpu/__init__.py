"""Look at a graphics card for the first time, and at what can be known of it without one."""
