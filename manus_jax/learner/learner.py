"""The policy and the critic as things that learn: a state, its update, and its forward pass.

A `Learner` is what the training loop holds of a model. It knows packing and the mesh, nothing of
episodes or algorithms: samples with per-token fields come in, metrics and per-token numbers go out.

Of several processes only the first has samples. It tells the others what it is about to run, and
they run the same programs on batches that are blank until process 0's takes their place.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from manus_jax.learner import objectives
from manus_jax.learner.packing import Layout, Packed, Sample, pack, with_loss_weights
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

# What every packed batch holds; all other fields are float32.
_ROWS = {
    "input_ids": np.int32,
    "segment_ids": np.int32,
    "positions": np.int32,
    "loss_mask": np.bool_,
}

Together = Callable[..., AbstractContextManager[None]]
"""`with together(do="update", …)` has the other processes, if there are any, do the same."""


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
    """One model in training; `name` is what other processes know it by."""

    def __init__(self, params: Params, design: Design, mesh: Mesh, name: str, together: Together):
        self.mesh = mesh
        self.layout = design.layout
        self.state = init_state(params, design.optimizer, mesh)
        self._name, self._together = name, together
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
        with self._together(do="update", learner=self._name, fields=sorted(packed.arrays)):
            sums = self.update_packed(packed)
            return {**objectives.token_means(sums), **packed.metrics()}

    def update_packed(self, packed: Packed) -> dict[str, jax.Array]:
        """What all processes do of `update`; the sums of its metrics."""
        self.state, sums = self._update(self.state, *put_batch(packed, self.mesh))
        return sums

    def forward(
        self, samples: Sequence[Sample], reference: "Reference | None" = None
    ) -> list[np.ndarray]:
        """Log-probs or values of each sample's tokens, float32 [T], 0 outside its mask.

        A `reference` policy may stand in for the learner's own parameters.
        """
        outputs: list[np.ndarray] = []
        capacity = self.layout.micro_batches * self.layout.rows
        for start in range(0, len(samples), capacity):
            part = samples[start : start + capacity]
            packed = pack(_only(part, ()), self.layout)
            with self._together(do="forward", learner=self._name, reference=reference is not None):
                out = np.asarray(self.forward_packed(packed, reference))
            outputs += [
                np.where(s.loss_mask, x, 0.0).astype(np.float32)
                for s, x in zip(part, packed.unpack(out), strict=True)
            ]
        return outputs

    def forward_packed(self, packed: Packed, reference: "Reference | None") -> jax.Array:
        """What all processes do of `forward`; float32 [micro_batches, rows, length]."""
        params = self.state.params if reference is None else reference.params()
        return self._forward(params, *put_batch(packed, self.mesh))

    def blank(self, fields: Sequence[str] = tuple(_ROWS)) -> Packed:
        """A batch of `fields` with nothing in it, for a process that has no samples."""
        shape = (self.layout.micro_batches, self.layout.rows, self.layout.length)
        arrays: dict[str, np.ndarray] = {
            name: np.zeros(shape, _ROWS.get(name, np.float32)) for name in fields
        }
        return Packed(arrays, (), 0)


def _only(samples: Sequence[Sample], fields: Sequence[str]) -> list[Sample]:
    return [dataclasses.replace(s, fields={k: s.fields[k] for k in fields}) for s in samples]


class Reference:
    """A frozen policy. On the host it costs device memory only while it is used.

    There each process keeps the slices of its own devices.
    """

    def __init__(self, params: Params, on_host: bool):
        self._kept = jax.tree.map(_HostArray if on_host else jnp.copy, params)

    def params(self) -> Params:
        return jax.tree.map(
            lambda x: x.on_devices() if isinstance(x, _HostArray) else x, self._kept
        )


class _HostArray:
    """This process's slices of an array, in host memory; equal slices are kept once."""

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}
        self._slices = {index: np.array(data) for index, data in shards.items()}

    def on_devices(self) -> jax.Array:
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._slices[str(index)]
        )
