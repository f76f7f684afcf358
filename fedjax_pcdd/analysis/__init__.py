"""Analyses of the papers beside accuracy, such as angles between class vectors and the spectrum of features."""
