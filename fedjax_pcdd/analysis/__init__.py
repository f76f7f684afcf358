"""What the papers look at beside accuracy: angles between class vectors, the spectrum of features."""
