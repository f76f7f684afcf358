"""fedjax_pcdd: federated learning under partially class-disjoint data, with vectorised clients."""

__version__ = "0.1.0"
