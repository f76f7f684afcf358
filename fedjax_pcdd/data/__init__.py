"""Data sets, partitions, federations, and the processing of images on their way into a model."""
