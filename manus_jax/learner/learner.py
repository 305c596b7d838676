"""A model in training, policy or critic: its state, its update and its forward pass.

A `Learner` works on packed rows and a mesh and is independent of episodes and algorithms: its input
is a packed batch with per-token columns, its output metrics or a new column. With several
processes, all of them call the same methods with the same batch.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from manus_jax.algorithms.aggregation import token_weights
from manus_jax.data_proto import DataProto
from manus_jax.dispatch import starting
from manus_jax.learner import objectives
from manus_jax.learner.mesh import param_shardings
from manus_jax.learner.packing import PackedRows, RowShape
from manus_jax.learner.update import (
    Frozen,
    Objective,
    Params,
    TrainState,
    abstract_state,
    init_state,
    make_evaluate,
    make_forward,
    make_update,
    put_batch,
    put_shards,
    state_shardings,
)
from manus_jax.models.lora import Lora, merge


@dataclasses.dataclass(frozen=True)
class LearnerSpec:
    """Everything about a model in training except its weights.

    `columns` are the per-token columns that the objective reads. The buffers of updates and forward
    passes initially hold `update_micro_batches` and `forward_micro_batches`. A larger batch
    enlarges them, which recompiles the program. With `lora`, `shapes` are those of the adapters,
    and `frozen` those of the base. With `routing`, the numbers of layers and of experts per token,
    every pass replays the experts in the column `routed_experts`.
    """

    shapes: Params
    objective: Objective
    forward: Callable[[Params, dict[str, jax.Array]], jax.Array]
    optimizer: optax.GradientTransformation
    columns: tuple[str, ...]
    row_shape: RowShape
    update_micro_batches: int
    forward_micro_batches: int
    aggregation: str = "token-mean"
    norm_constant: float | None = None
    optimizer_on_host: bool = False
    in_place: bool = False
    frozen: Frozen = ()
    lora: Lora | None = None
    routing: tuple[int, int] | None = None

    @property
    def replayed(self) -> tuple[str, ...]:
        """The columns that every pass reads, besides those of the packing."""
        return () if self.routing is None else ("routed_experts",)


# Implicit transfers between host and devices are errors: in a training step, they would be slow.
_no_implicit_transfers = functools.partial(jax.transfer_guard, "disallow")


class Learner:
    """One model in training; `frozen` are the parameters that complete those in training."""

    def __init__(self, params: Params, spec: LearnerSpec, mesh: Mesh, frozen: Frozen = ()) -> None:
        self.mesh, self.spec, self.frozen = mesh, spec, frozen
        on_host = spec.optimizer_on_host
        self.state = init_state(params, spec.optimizer, mesh, on_host)
        self._update = make_update(
            spec.objective, spec.optimizer, mesh, spec.shapes, on_host, spec.frozen, spec.in_place
        )
        self._forward = make_forward(spec.forward, mesh, spec.shapes, spec.frozen)
        self._evaluate = make_evaluate(spec.objective, mesh, spec.shapes, spec.frozen)
        self._capacity = {
            "update": spec.update_micro_batches,
            "forward": spec.forward_micro_batches,
        }

    def abstract_state(self) -> TrainState:
        """Shapes and shardings of the state, for restoring a checkpoint."""
        spec = self.spec
        shardings = state_shardings(spec.shapes, spec.optimizer, self.mesh, spec.optimizer_on_host)
        return abstract_state(self.state, shardings)

    def merged(self) -> Params:
        """The parameters of the model in training; with LoRA, adapted weights are merged later."""
        if self.spec.lora is None:
            return self.state.params
        return merge(self.frozen[0], self.state.params, self.spec.lora)

    def update(self, batch: DataProto) -> dict[str, float]:
        """Takes one optimizer step on the batch; returns metric means over its trained tokens."""
        return self.start_update(batch)()

    def start_update(self, batch: DataProto) -> Callable[[], dict[str, float]]:
        """Dispatches an optimizer step; calling the result waits for its metrics."""
        weighted = self._with_loss_weights(batch)
        rows = self._rows(weighted, "update")
        arrays = rows.arrays((*self.spec.columns, "loss_weights", *self.spec.replayed))
        with starting(self.mesh), _no_implicit_transfers():
            placed = put_batch(arrays, rows.used, self.mesh)
            self.state, sums = self._update(self.state, *placed, *self.frozen)
        return lambda: {**objectives.token_means(sums), **rows.metrics()}

    def forward(
        self, batch: DataProto, column: str, reference: "Reference | BaseReference | None" = None
    ) -> DataProto:
        """Log-probs or values of the trained tokens as `column`, float32, 0 outside the loss mask.

        If `reference` is given, its parameters are used instead of the learner's own.
        """
        rows = self._rows(batch, "forward")
        with starting(self.mesh), _no_implicit_transfers():
            params = self.state.params if reference is None else reference.params()
            placed = put_batch(rows.arrays(self.spec.replayed), rows.used, self.mesh)
            out = self._forward(params, *placed, *self.frozen)
        unpacked = rows.unpack(jax.device_get(out))
        values = np.where(np.asarray(batch.batch["loss_mask"]), unpacked, 0.0)
        return DataProto.from_dict({column: values.astype(np.float32)})

    def evaluate(self, batch: DataProto) -> dict[str, float]:
        """Sums of the objective's metrics over the trained tokens, without an update."""
        rows = self._rows(self._with_loss_weights(batch), "update")
        arrays = rows.arrays((*self.spec.columns, "loss_weights", *self.spec.replayed))
        with starting(self.mesh), _no_implicit_transfers():
            placed = put_batch(arrays, rows.used, self.mesh)
            sums = self._evaluate(self.state.params, *placed, *self.frozen)
        return {name: float(x) for name, x in jax.device_get(sums).items()}

    def _with_loss_weights(self, batch: DataProto) -> DataProto:
        """Adds per-token `loss_weights`, which include the denominators of the whole batch."""
        mask = np.asarray(batch.batch["loss_mask"])
        weights = token_weights(mask, self.spec.aggregation, self.spec.norm_constant)
        return batch.union(DataProto.from_dict({"loss_weights": weights}))

    def _rows(self, batch: DataProto, purpose: str) -> PackedRows:
        rows = PackedRows(batch, self.spec.row_shape, self._capacity[purpose])
        if rows.used > self._capacity[purpose]:
            self._capacity[purpose] = 1 << (rows.used - 1).bit_length()
            rows = PackedRows(batch, self.spec.row_shape, self._capacity[purpose])
        return rows


class Reference:
    """A frozen policy in `dtype`. With `on_host` it uses device memory only in a forward pass.

    Each process then keeps the shards of its own devices in host memory.
    """

    def __init__(self, params: Params, on_host: bool, dtype: str = "float32"):
        keep = _HostArray if on_host else jnp.copy
        self._kept = jax.tree.map(lambda x: keep(x.astype(dtype)), params)

    def params(self) -> Params:
        return jax.tree.map(
            lambda x: x.on_devices() if isinstance(x, _HostArray) else x, self._kept
        )


class BaseReference:
    """The base of a policy with adapters: the same frozen parameters, with adapters of zero."""

    def __init__(self, spec: LearnerSpec, mesh: Mesh):
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spec.shapes)
        self.params = jax.jit(zeros, out_shardings=param_shardings(spec.shapes, mesh))


class _HostArray:
    """This process's shards of an array in host memory; replicated shards are stored once."""

    def __init__(self, array: jax.Array):
        self._shape, self._sharding = array.shape, array.sharding
        shards = {str(shard.index): shard.data for shard in array.addressable_shards}
        self._slices = {index: np.array(data) for index, data in shards.items()}

    def on_devices(self) -> jax.Array:
        return put_shards(self._shape, self._sharding, lambda index: self._slices[str(index)])
