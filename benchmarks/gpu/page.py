"""docs/gpu.md."""


def write(out):
    pass
