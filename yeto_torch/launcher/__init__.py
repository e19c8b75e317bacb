"""A whole fleet on this machine: its processes, its run folder, and the final model in it."""
