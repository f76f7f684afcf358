"""A run from the command line to its folder: configuration, rounds, checkpoints, records."""
