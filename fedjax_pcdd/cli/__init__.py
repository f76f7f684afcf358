"""The command line: options to calls of the library."""
