"""A process that is not the first: it does its part of whatever process 0 begins.

It holds its shards of the policy, the critic and the reference, and its share of every checkpoint;
it has no tasks, episodes, engine or metrics. Each command names one thing that all processes do
together, so there is no other order than process 0's.
"""

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from types import FrameType

import numpy as np

from manus_jax.config.commands import TrainConfig
from manus_jax.errors import Stopped
from manus_jax.learner.learner import Learner, Reference
from manus_jax.learner.mesh import make_mesh
from manus_jax.models import loading as policy_source
from manus_jax.training.build import build_learners, open_checkpoints, warm_start
from manus_jax.training.checkpoints import Checkpoints
from manus_jax.training.distributed import Command, Preemption, Team, alone
from manus_jax.training.learner_specs import make_recipe
from manus_jax.training.run_directory import RunDirectory
from manus_jax.training.trainer import restore_states, save_states
from manus_jax.weights.host_tensors import gathered


class Follower:
    """The parts of a run that lie on this process, once process 0 has said where they come from."""

    def __init__(self, config: TrainConfig, directory: RunDirectory, model: str) -> None:
        mesh = make_mesh(**dataclasses.asdict(config.mesh))
        source = policy_source.from_path(Path(model))
        learners, reference = build_learners(
            config, make_recipe(config.algorithm), source, mesh, alone
        )
        self._learners: dict[str, Learner] = learners
        self._reference: Reference | None = reference
        self._checkpoints: Checkpoints = open_checkpoints(config, directory, learners)
        self._preemption = Preemption(self._checkpoints.preempted)

    def do(self, command: Command) -> None:
        match command:
            case {"do": "update", "learner": name, "fields": fields}:
                learner = self._learners[name]
                learner.update_packed(learner.blank(fields))
            case {"do": "forward", "learner": name, "reference": instead}:
                learner = self._learners[name]
                learner.forward_packed(learner.blank(), self._reference if instead else None)
            case {"do": "gather", "path": path, "layer": layer, "dtype": dtype}:
                params = self._learners["policy"].state.params
                gathered(params, tuple(path), layer, np.dtype(dtype))
            case {"do": "save", "step": step, "score": score}:
                save_states(self._checkpoints, step, self._learners, {}, score)
            case {"do": "restore", "step": step}:
                restore_states(self._checkpoints, step, self._learners)
            case {"do": "preempted", "step": step}:
                self._preemption(step)
            case _:
                raise ValueError(f"process 0 said {command}, which this process does not know")

    def close(self) -> None:
        self._checkpoints.close()


def follow(config: TrainConfig, team: Team) -> None:
    """Takes part until process 0 says that it is over; raises Stopped where the run stops."""
    signal.signal(signal.SIGINT, _stop_all)
    directory = RunDirectory(config.train.run_dir, "")
    with contextlib.ExitStack() as stack:
        follower: Follower | None = None
        for command in team.commands():
            match command:
                case {"do": "stop", "said": said, "code": code}:
                    break
                case {"do": "warm_start"}:
                    warm_start(config, directory)
                case {"do": "build", "model": model}:
                    follower = Follower(config, directory, model)
                    stack.callback(follower.close)
                case _:
                    assert follower is not None
                    follower.do(command)
    if code:
        raise Stopped(said, code)


def _stop_all(number: int, _: FrameType | None) -> None:
    """Ctrl-C on this host: as if it were to be given back, which process 0 gets to know."""
    os.kill(os.getpid(), signal.SIGTERM)
