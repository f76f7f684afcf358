"""Data sets, partitions, federations, and what happens to images on their way into a model."""
