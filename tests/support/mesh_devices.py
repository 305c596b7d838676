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
