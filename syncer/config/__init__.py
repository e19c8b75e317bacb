"""From YAML and the command line to one frozen policy, every value checked."""
