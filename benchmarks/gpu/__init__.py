"""A GPU day in three commands: whether everything works there, how fast it is, and the papers' runs."""
