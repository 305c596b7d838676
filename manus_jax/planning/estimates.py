"""An update's work, memory and traffic from the sizes alone, with no compiler.

Products are counted exactly, by the parameters they read. Memory and traffic are those of the
update as it is written (learner/update.py, models/transformer.py): float32 state and gradients,
sharded; layers gathered one at a time in the compute type; what the remat policy saves of each.
Plans that were compiled use their own figures and only the model's FLOPs from here.
"""

import dataclasses
import math
from collections.abc import Mapping

from manus_jax.models.architecture import Architecture
from manus_jax.models.log_probs import chunk_size
from manus_jax.models.transformer import layer_shapes
from manus_jax.planning.compiling import StateBytes

# Products and the attention kernel that the backward pass runs again, and what it finds saved
# instead, by remat policy (models/transformer.py). The last product of a layer never runs again.
_AGAIN = {
    "full": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "attention": ("o_proj", "gate_proj", "up_proj"),
    "minimal": (),
    "none": (),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One update of one model. `trained` is the share of tokens that are the agent's own.

    `shards` are the mesh's sizes by axis, `itemsize` the bytes of the compute type.
    """

    arch: Architecture
    has_lm_head: bool
    micro_batches: int
    rows: int
    length: int
    trained: float
    remat: str
    itemsize: int
    shards: Mapping[str, int]

    @property
    def tokens(self) -> int:
        return self.micro_batches * self.rows * self.length

    @property
    def chips(self) -> int:
        return math.prod(self.shards.values())

    @property
    def tensor(self) -> int:
        return self.shards["tensor"]

    @property
    def parameter_shards(self) -> int:
        """Over how many chips a layer is gathered."""
        return self.shards["fsdp"] * self.shards["sequence"]

    @property
    def chip_tokens(self) -> float:
        """Tokens of a micro-batch that a chip holds; the chips of a tensor group share them."""
        return self.rows * self.length * self.tensor / self.chips

    @property
    def chunk(self) -> int:
        """How many tokens of a chip the head projects at a time."""
        return chunk_size(int(self.chip_tokens))

    @property
    def chunks(self) -> int:
        """How many chunks of trained tokens the head goes through."""
        return max(1, math.ceil(self.trained * self.chip_tokens / self.chunk))


def product_parameters(arch: Architecture) -> dict[str, int]:
    """Parameters of one layer that tokens are multiplied with, by name."""
    return {n: math.prod(s) for n, s in layer_shapes(arch).items() if n.endswith("_proj")}


def _head(w: Workload) -> int:
    return w.arch.vocab_size * w.arch.hidden_size if w.has_lm_head else 0


def attention_flops(w: Workload) -> float:
    """FLOPs of scores and weighted sums, forward, of rows that are one segment each, causal."""
    per_token = 2.0 * w.arch.num_heads * w.arch.head_dim * w.length
    return per_token * w.tokens * w.arch.num_layers


def model_flops(w: Workload) -> float:
    """FLOPs that the update cannot do without: 6 N per token, and attention.

    The embedding is looked up and counts for nothing; the head counts where a token is trained.
    """
    layers = 6.0 * w.arch.num_layers * sum(product_parameters(w.arch).values()) * w.tokens
    return layers + 6.0 * _head(w) * w.trained * w.tokens + 3 * attention_flops(w)


def executed_flops(w: Workload) -> float:
    """FLOPs of one chip with what remat computes again and the head's second projection.

    The backward kernels of attention build the scores twice: 7 products, not 4.
    """
    products = product_parameters(w.arch)
    again = sum(products[name] for name in _AGAIN[w.remat])
    layers = w.arch.num_layers * (6.0 * sum(products.values()) + 2.0 * again) * w.tokens
    head = 8.0 * _head(w) / w.tensor * w.micro_batches * w.chunks * w.chunk
    kernels = (2 + 7 + (2 if w.remat == "full" else 0)) / 2
    return (layers + kernels * attention_flops(w)) / w.chips + head


def saved_per_token(w: Workload) -> float:
    """Bytes that a layer keeps of each token for the backward pass, on one chip."""
    a = w.arch
    q, kv = a.num_heads * a.head_dim / w.tensor, a.num_kv_heads * a.head_dim / w.tensor
    mlp, d = a.intermediate_size / w.tensor, a.hidden_size
    attention = d + 2 * q + 2 * kv
    numbers = {
        "full": d,
        "attention": attention,
        "minimal": attention + 2 * mlp + 2 * d,
        # Norms in float32, rotated copies, the gated product: about twice as much again.
        "none": 2 * (attention + 2 * mlp + 2 * d) + 4 * d,
    }
    return numbers[w.remat] * w.itemsize


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one chip besides parameters and optimizer."""

    gradients: float
    copies: float
    activations: float
    layer: float
    head: float

    @property
    def temporaries(self) -> float:
        """All but the gradients, when they are most: in the layers' backward pass or the head's."""
        return self.copies + self.activations + max(self.layer, self.head)


def estimate_memory(w: Workload, state: StateBytes) -> MemoryEstimate:
    a, tokens = w.arch, w.chip_tokens
    layer = sum(product_parameters(a).values()) / w.tensor
    stacked = w.arch.num_layers * layer / w.parameter_shards
    q, kv = a.num_heads * a.head_dim / w.tensor, a.num_kv_heads * a.head_dim / w.tensor
    mlp = a.intermediate_size / w.tensor
    # One layer forward again and backward: its arrays and their gradients, norms in float32; its
    # weights gathered, the next one's under way, and their gradients before they are scattered.
    live = tokens * (2 * (2 * q + 2 * kv + 3 * mlp + 2 * a.hidden_size) * w.itemsize)
    live += tokens * 3 * a.hidden_size * 4
    weights = 3 * layer * w.itemsize
    logits = 3 * w.chunk * a.vocab_size / w.tensor * 4
    head = _head(w) / w.tensor * (w.itemsize + 4) + logits + 2 * tokens * a.hidden_size * 4
    return MemoryEstimate(
        gradients=float(state.parameters),
        copies=2 * stacked * w.itemsize,
        activations=a.num_layers * saved_per_token(w) * tokens,
        layer=live + weights,
        head=head if w.has_lm_head else 0.0,
    )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A kind of collective: what one chip sends in an update, over which axes of the mesh."""

    kind: str
    axes: tuple[str, ...]
    times: int
    sent: float


def estimate_exchanges(w: Workload) -> list[Exchange]:
    """What sharded training exchanges at the least: weights in, gradients out, activations.

    Weights are gathered for the forward and again for the backward pass; gradients are scattered
    in the compute type, the head's in float32, and cross the data axis once a micro-batch.
    """
    a, n, layers = w.arch, w.micro_batches, w.arch.num_layers
    weights = layers * sum(product_parameters(a).values()) / w.tensor
    head = _head(w) / w.tensor
    f, d, t = w.parameter_shards, w.shards["data"], w.tensor
    ring = lambda size: (size - 1) / size
    out = []
    if f > 1:
        over = ("fsdp", "sequence") if w.shards["sequence"] > 1 else ("fsdp",)
        gathered = 2 * (weights + head) * w.itemsize * ring(f)
        out.append(Exchange("all-gather", over, 2 * n * (layers + 1), n * gathered))
        scattered = (weights * w.itemsize + head * 4) * ring(f)
        out.append(Exchange("reduce-scatter", over, n * (layers + 1), n * scattered))
    if d > 1:
        summed = 2 * (weights * w.itemsize + head * 4) / f * ring(d)
        out.append(Exchange("all-reduce", ("data",), n * (layers + 1), n * summed))
    if t > 1:
        times = layers * (4 + (2 if w.remat == "full" else 1))
        each = 2 * w.chip_tokens * a.hidden_size * w.itemsize * ring(t)
        out.append(Exchange("all-reduce", ("tensor",), n * times, n * times * each))
    if (s := w.shards["sequence"]) > 1:
        kv = 2 * a.num_kv_heads * a.head_dim / t * w.itemsize
        each = w.chip_tokens * (s - 1) * kv
        out.append(Exchange("all-gather", ("sequence",), 3 * n * layers, 3 * n * layers * each))
    return out


def estimate_bytes(w: Workload, state: StateBytes) -> float:
    """Bytes that one chip moves to and from its memory.

    Gathered weights are written once and read by four products; each product reads and writes
    its activations; the optimizer reads and writes the whole state once.
    """
    a = w.arch
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    weights = a.num_layers * sum(product_parameters(a).values()) / w.tensor * w.itemsize
    numbers = (4 * a.hidden_size * w.tensor + 4 * q + 4 * kv + 6 * a.intermediate_size) / w.tensor
    activations = 4 * a.num_layers * w.chip_tokens * numbers * w.itemsize
    head = w.chunks * _head(w) / w.tensor * (3 * w.itemsize + 8)
    optimizer = 2 * (state.parameters + state.optimizer) + state.parameters
    return w.micro_batches * (5 * weights + activations + head + 2 * state.parameters) + optimizer
