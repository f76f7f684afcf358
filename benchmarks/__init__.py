"""How fast and how large a round is, beside a plain PyTorch loop over clients; see benchmarks/README.md."""
