"""Every hardware file builds its learners on as many virtual devices as its machines have.

A program of its own, because a process has a fixed number of devices. The model is tiny, and is
sharded and given an optimizer as a real one would be; nothing is compiled for its rows.
"""

import os
import subprocess
import sys
from pathlib import Path

from mesh_devices import HARDWARE

ROOT = Path(__file__).parents[2]
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
BUILD = """
import dataclasses, sys
import jax
import numpy as np
from manus_jax.config.commands import read_train_config
from manus_jax.learner.learner import Learner, Reference
from manus_jax.learner.mesh import make_mesh, param_shardings
from manus_jax.models.architecture import Architecture
from manus_jax.rollout.build_rollout import with_engine_settings
from manus_jax.training.learner_specs import critic_spec, make_recipe, policy_spec

arch = Architecture("qwen2", 512, 128, 256, 2, 8, 8, 16, qkv_bias=True)
for name, count in (argument.split("=") for argument in sys.argv[1:]):
    files = [f"configs/{f}.gin" for f in ("envs/textcraft", "recipes/ppo", f"hardware/{name}")]
    config = with_engine_settings(read_train_config(files, []))
    sizes = {**dataclasses.asdict(config.mesh), "slices": None}  # one process: no machines
    mesh = make_mesh(**sizes, devices=jax.devices()[: int(count)])
    made = []
    for spec in (
        policy_spec(config, make_recipe(config.algorithm), arch, mesh),
        critic_spec(config, arch, mesh),
    ):
        params = jax.tree.map(
            lambda x, where: jax.device_put(np.zeros(x.shape, x.dtype), where),
            spec.shapes,
            param_shardings(spec.shapes, mesh),
        )
        made.append(Learner(params, spec, mesh))
    Reference(made[0].state.params, config.algorithm.reference == "host")
    held = {d for x in jax.tree.leaves(made[0].state.params) for d in x.sharding.device_set}
    print(name, len(held), spec.row_shape.rows, flush=True)
"""


def test_learners_are_built_on_all_devices_of_every_hardware_file():
    counts = {name: len(devices()) for name, (devices, _) in HARDWARE.items()}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, *(f"{name}={count}" for name, count in counts.items())],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "64", "XLA_FLAGS": FAST, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    built = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert built == counts
