"""GPUs and TPUs that are not there: XLA's compilers for them run on any computer and show what becomes of a program.

Without the device nothing is timed, so XLA's choices between libraries and tilings may differ on a real one.
"""

import importlib.util
import os
from typing import Any, NamedTuple

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Target(NamedTuple):
    """A kind of device.

    Attributes:
      platform: as XLA calls it, "cuda" or "tpu".
      backend: as `jax.default_backend()` calls it, "gpu" or "tpu".
      package: the package that has the compiler.
      topology: arguments of `jax.experimental.topologies.get_topology_desc`.
      environment: variables that the compiler needs.
    """

    platform: str
    backend: str
    package: str
    topology: dict[str, str]
    environment: dict[str, str]


def _tpu(name: str, kind: str) -> Target:
    environment = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": kind}
    environment |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    environment |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # no device is shared, so several may compile at once
    return Target("tpu", "tpu", "libtpu", {"topology_name": f"{name}:2x2"}, environment)


TARGETS = {
    "h100": Target(
        "cuda", "gpu", "jax_cuda12_plugin", {"target_config": H100, "topology": "1x1x1"},
        {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},  # there is nothing to time on
    ),
    "v5e": _tpu("v5e", "v5litepod-4"),
    "v6e": _tpu("v6e", "v6e-4"),
}  # fmt: skip


def missing(name: str) -> str:
    """A sentence that says what to install for a target; "" if nothing is missing."""
    package = TARGETS[name].package
    if importlib.util.find_spec(package):
        return ""
    return f"XLA's compiler for {name} ({package}) is not installed: pip install -e '.[accelerator]' (5.5 GB)."


def environment(name: str) -> dict[str, str]:
    """The environment of a process that compiles for a target: this one's, on the CPU, without a cache of programs."""
    inherited = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    target_variables = TARGETS[name].environment
    flags = f"{inherited.get('XLA_FLAGS', '')} {target_variables.get('XLA_FLAGS', '')}".strip()
    return inherited | target_variables | {"XLA_FLAGS": flags}


def imagine(name: str) -> None:
    """Let everything traced in this process from now on make the choices of the target's backend."""
    import jax

    backend = TARGETS[name].backend
    jax.default_backend = lambda: backend


def sharding_on(name: str) -> Any:
    """One device of a target, as the sharding of abstract arguments."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    target = TARGETS[name]
    topology = topologies.get_topology_desc(platform=target.platform, **target.topology)
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("one",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
