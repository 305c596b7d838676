"""The policy and the critic as things that learn: a state, its update, and its forward pass.

A `Learner` is what the training loop holds of a model. It knows packing and the mesh, nothing of
episodes or algorithms: samples with per-token fields come in, metrics and per-token numbers go out.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from manus_jax.learner import objectives
from manus_jax.learner.mesh import param_shardings
from manus_jax.learner.packing import Layout, Sample, pack, with_loss_weights
from manus_jax.learner.update import (
    Objective,
    Params,
    TrainState,
    init_state,
    make_forward,
    make_update,
    put_batch,
    state_shardings,
)

_ROWS = ("input_ids", "segment_ids", "positions", "loss_mask")


@dataclasses.dataclass(frozen=True)
class Design:
    """Everything about a model in training but its weights.

    `layout` bounds a batch: as many sequences as it has rows always fit, and no shape ever changes.
    """

    shapes: Params
    objective: Objective
    forward: Callable[[Params, dict[str, jax.Array]], jax.Array]
    optimizer: optax.GradientTransformation
    layout: Layout


class Learner:
    """One model in training."""

    def __init__(self, params: Params, design: Design, mesh: Mesh):
        self.mesh = mesh
        self.layout = design.layout
        self.state = init_state(params, design.optimizer, mesh)
        self._shapes, self._optimizer = design.shapes, design.optimizer
        self._update = make_update(design.objective, design.optimizer, mesh, design.shapes)
        self._forward = make_forward(design.forward, mesh, design.shapes)

    def abstract_state(self) -> TrainState:
        """Shapes and placements of the state, for restoring a checkpoint."""
        shardings = state_shardings(self._shapes, self._optimizer, self.mesh)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.state, shardings
        )

    def update(
        self,
        samples: Sequence[Sample],
        fields: Sequence[str],
        aggregation: str,
        norm_constant: float | None = None,
    ) -> dict[str, float]:
        """One optimizer step on the samples; means over their trained tokens."""
        weighed = with_loss_weights(_only(samples, fields), aggregation, norm_constant)
        packed = pack(weighed, self.layout)
        self.state, sums = self._update(self.state, *put_batch(packed, self.mesh))
        return {**objectives.token_means(sums), **packed.metrics()}

    def forward(self, samples: Sequence[Sample], params: Params | None = None) -> list[np.ndarray]:
        """Log-probs or values of each sample's tokens, float32 [T], 0 outside its mask.

        `params` stand in for the learner's own: a reference policy.
        """
        outputs: list[np.ndarray] = []
        capacity = self.layout.micro_batches * self.layout.rows
        for start in range(0, len(samples), capacity):
            part = samples[start : start + capacity]
            packed = pack(_only(part, ()), self.layout)
            batch, used = put_batch(packed, self.mesh)
            rows = {name: batch[name] for name in _ROWS}
            out = self._forward(self.state.params if params is None else params, rows, used)
            outputs += [
                np.where(s.loss_mask, x, 0.0).astype(np.float32)
                for s, x in zip(part, packed.unpack(np.asarray(out)), strict=True)
            ]
        return outputs


def _only(samples: Sequence[Sample], fields: Sequence[str]) -> list[Sample]:
    return [dataclasses.replace(s, fields={k: s.fields[k] for k in fields}) for s in samples]


class Reference:
    """A frozen policy. On the host it costs device memory only while it is used."""

    def __init__(self, params: Params, on_host: bool, mesh: Mesh):
        copied = jax.tree.map(lambda x: x.copy(), params)
        self._on_host = on_host
        self._params: Any = jax.device_get(copied) if on_host else copied
        self._shardings = param_shardings(params, mesh)

    def params(self) -> Params:
        return jax.device_put(self._params, self._shardings) if self._on_host else self._params
