"""A run: the loop over rounds, its records, checkpoints and resumption."""
