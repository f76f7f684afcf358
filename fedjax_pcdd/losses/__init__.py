"""Losses as pure functions of arrays; they know nothing of models, methods or clients.

Letters: B samples of a batch, C classes, D feature dimensions, K clients. A loss takes `mask` [B], bool or
0/1 (None: all samples count); a sample with mask 0 is as good as removed, for the value and the gradient.
Sums are done in float32 or better and matrix products at full precision, whatever the dtype of the features.
"""
