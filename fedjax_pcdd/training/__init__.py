"""A run: one loop over rounds, what is recorded, kept and resumed."""
