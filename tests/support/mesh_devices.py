"""Devices of machines that are not here, for laying out meshes over them."""

import os

import pytest


class Device:
    """What a device of a machine that is not here tells about itself."""

    def __init__(self, number, process, machine=None):
        self.id, self.process_index = number, process
        self.platform, self.device_kind = "gpu", "some GPU"
        if machine is not None:
            self.slice_index = machine


def gpus(machines, per_machine, per_process):
    """GPUs in JAX's order; `slice_index` is their machine."""
    numbers = range(machines * per_machine)
    return [Device(i, i // per_process, i // per_machine) for i in numbers]


def tpus(topology, slices=1):
    """TPU device descriptions from libtpu, which needs no TPU for that."""
    pytest.importorskip("libtpu", reason="descriptions of TPUs come from libtpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies

    more = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(topology, platform="tpu", **more).devices


# The learner's devices, by hardware file, and the topology that `plan` compiles for.
HARDWARE = {
    "tpu_v5e_64": (lambda: tpus("v5e:8x8"), "v5e:8x8"),
    "tpu_v5p_32": (lambda: tpus("v5p:2x2x4"), "v5p:2x2x4"),
    "tpu_v6e_16": (lambda: tpus("v6e:4x4"), "v6e:4x4"),
    "tpu_host": (lambda: tpus("v5p:2x2x1"), "v5p:2x2x1"),
    "gpus_one_host": (lambda: gpus(1, 4, 4), "cuda:4x80GB"),
    "gpus_many_hosts": (lambda: gpus(2, 8, 8), "cuda:2x8x80GB"),
    "single_gpu": (lambda: gpus(1, 1, 1), "cuda:1x80GB"),
}
