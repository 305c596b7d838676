"""A learner with several processes publishes the same weights as one."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from published_models import copies, exported, model

from manus_jax.weights.mirror import Mirror

_PUBLISHING = """
import sys
from pathlib import Path
import jax
import numpy as np
from manus_jax.config.settings import DistributedSettings
from manus_jax.training.job import joined

settings = DistributedSettings(coordinator=sys.argv[1], processes=2, process_id=int(sys.argv[2]))
with joined(settings) as job:
    from published_models import ARCH, CARD, model
    from manus_jax.learner.mesh import make_mesh, param_shardings
    from manus_jax.models.transformer import Compute, Transformer, abstract_model
    from manus_jax.weights.host_tensors import gather_to_host, types_of
    from manus_jax.weights.publisher import Publisher

    params = jax.tree.map(np.asarray, model())
    _, shapes = abstract_model(Transformer, ARCH, Compute())
    shardings = param_shardings(shapes, make_mesh(1, 2, 1))
    place = lambda x, s: jax.make_array_from_callback(x.shape, s, lambda index: x[index])
    placed = jax.tree.map(place, params, shardings)
    assert not all(x.is_fully_addressable for x in jax.tree.leaves(placed))
    whole = gather_to_host(placed, job.primary, types_of(CARD))
    if job.primary:
        assert {x.dtype.name for x in jax.tree.leaves(whole)} == {"bfloat16"}
        publisher = Publisher(Path(sys.argv[3]), CARD)
        publisher.publish(whole, 5)
        publisher.close()
    else:
        assert not jax.tree.leaves(whole)
"""


def test_tensors_that_lie_on_two_processes_are_published_whole(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    here = str(Path(__file__).parents[1] / "support")
    environment = {**os.environ, "PYTHONPATH": here, "XLA_FLAGS": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PUBLISHING, address, str(number), str(tmp_path / "weights")],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-2000:]
    mirror = Mirror(tmp_path)
    mirror.advance(tmp_path / "weights", 5)
    assert copies(mirror) == exported(model(), tmp_path / "hf")
