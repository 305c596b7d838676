"""FLOPs, memory and communication of an update, from the sizes of model, batch and mesh.

FLOPs are exact counts of the matrix products in models/transformer.py and of the attention kernels.
Memory and communication are what the update needs at least: compilers allocate more, so a compiled
plan uses the compiler's figures.
"""

import dataclasses
import math
from collections.abc import Mapping

from manus_jax.models.architecture import Architecture
from manus_jax.models.log_probs import chunk_size

# The products that the backward pass computes again, by remat policy (models/transformer.py).
_RECOMPUTED = {
    "full": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "attention": ("o_proj", "gate_proj", "up_proj"),
    "minimal": (),
    "none": (),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One update of one model.

    `trained` is the share of agent tokens, `shards` the size of each mesh axis, `itemsize` the
    bytes of a number in the compute type.
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
        """The number of chips that a layer is gathered from."""
        return self.shards["fsdp"] * self.shards["sequence"]

    @property
    def chip_tokens(self) -> float:
        """Tokens of a micro-batch on one chip; the chips of a tensor group hold the same ones."""
        return self.rows * self.length * self.tensor / self.chips

    @property
    def chunk(self) -> int:
        """Tokens that the LM head projects at a time on one chip."""
        return chunk_size(int(self.chip_tokens))

    @property
    def chunks(self) -> int:
        """Chunks of trained tokens in a micro-batch on one chip."""
        return max(1, math.ceil(self.trained * self.chip_tokens / self.chunk))

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer."""
        return sum(_matrices(self.arch).values())

    @property
    def head_parameters(self) -> int:
        return self.arch.vocab_size * self.arch.hidden_size if self.has_lm_head else 0


def _matrices(arch: Architecture) -> dict[str, int]:
    return {n: math.prod(s) for n, s in arch.layer_shapes.items() if n.endswith("_proj")}


def attention_flops(w: Workload) -> float:
    """FLOPs of the forward attention products, for rows of one causal segment each."""
    per_token = 2.0 * w.arch.num_heads * w.arch.head_dim * w.length
    return per_token * w.tokens * w.arch.num_layers


def model_flops(w: Workload) -> float:
    """FLOPs of the whole update without recomputation: 6 per parameter and token, and attention.

    The embedding is a lookup and does not count; the LM head counts for trained tokens only.
    """
    layers = 6.0 * w.arch.num_layers * w.layer_parameters * w.tokens
    return layers + 6.0 * w.head_parameters * w.trained * w.tokens + 3 * attention_flops(w)


def executed_flops(w: Workload) -> float:
    """FLOPs of one chip, including remat and the second projection of the LM head.

    The backward kernels of attention compute the scores twice: 7 products instead of 4.
    """
    again = sum(_matrices(w.arch)[name] for name in _RECOMPUTED[w.remat])
    layers = w.arch.num_layers * (6.0 * w.layer_parameters + 2.0 * again) * w.tokens
    head = 8.0 * w.head_parameters / w.tensor * w.micro_batches * w.chunks * w.chunk
    kernels = (2 + 7 + (2 if w.remat == "full" else 0)) / 2
    return (layers + kernels * attention_flops(w)) / w.chips + head


def saved_per_token(w: Workload) -> float:
    """Bytes per token that one layer keeps for the backward pass on one chip."""
    a, d = w.arch, w.arch.hidden_size
    attention = d + 2 * (a.num_heads + a.num_kv_heads) * a.head_dim / w.tensor
    minimal = attention + 2 * a.intermediate_size / w.tensor + 2 * d
    # Without remat: also norms in float32, rotated queries and keys, the gated product.
    numbers = {"full": d, "attention": attention, "minimal": minimal, "none": 2 * minimal + 4 * d}
    return numbers[w.remat] * w.itemsize


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of temporaries on one chip.

    `copies` are the parameters in the compute type and their gradients, `layer` and `head` the
    arrays in use while one layer or the LM head is computed.
    """

    copies: float
    activations: float
    layer: float
    head: float

    @property
    def total(self) -> float:
        return self.copies + self.activations + self.layer + self.head


def estimate_temporaries(w: Workload) -> MemoryEstimate:
    """What an update needs at least; compilers took up to 1.7 times as much."""
    a, tokens = w.arch, w.chip_tokens
    layer = w.layer_parameters / w.tensor
    heads = (a.num_heads + a.num_kv_heads) * a.head_dim / w.tensor
    mlp = a.intermediate_size / w.tensor
    # The arrays of a layer and their gradients, its norms in float32, its gathered weights, those
    # of the next layer, and the weight gradients before they are scattered.
    live = tokens * 2 * (2 * heads + 3 * mlp + 2 * a.hidden_size) * w.itemsize
    live += tokens * 3 * a.hidden_size * 4 + 3 * layer * w.itemsize
    logits = 3 * w.chunk * a.vocab_size / w.tensor * 4
    head = w.head_parameters / w.tensor * (w.itemsize + 4) + 2 * tokens * a.hidden_size * 4
    return MemoryEstimate(
        copies=2 * a.num_layers * layer / w.parameter_shards * w.itemsize,
        activations=a.num_layers * saved_per_token(w) * tokens,
        layer=live,
        head=head + logits if w.has_lm_head else 0.0,
    )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The collectives of one kind over some axes of the mesh; `sent` is per chip and update."""

    kind: str
    axes: tuple[str, ...]
    count: int
    sent: float


def estimate_exchanges(w: Workload) -> list[Exchange]:
    """The communication that the sharding requires.

    Weights are gathered for the forward and the backward pass. Gradients are reduced in the
    compute type (those of the LM head in float32) once per micro-batch.
    """
    a, n, layers = w.arch, w.micro_batches, w.arch.num_layers
    weights, head = layers * w.layer_parameters / w.tensor, w.head_parameters / w.tensor
    gradients = weights * w.itemsize + head * 4
    f, d, t, s = w.parameter_shards, w.shards["data"], w.tensor, w.shards["sequence"]
    ring = lambda size: (size - 1) / size
    out = []
    if f > 1:
        axes = ("fsdp", "sequence")
        gathered = n * 2 * (weights + head) * w.itemsize * ring(f)
        out.append(Exchange("all-gather", axes, 2 * n * (layers + 1), gathered))
        out.append(Exchange("reduce-scatter", axes, n * (layers + 1), n * gradients * ring(f)))
    if d > 1:
        summed = n * 2 * gradients / f * ring(d)
        out.append(Exchange("all-reduce", ("data",), n * (layers + 1), summed))
    if t > 1:
        times = n * layers * (4 + (2 if w.remat == "full" else 1))
        each = 2 * w.chip_tokens * a.hidden_size * w.itemsize * ring(t)
        out.append(Exchange("all-reduce", ("tensor",), times, times * each))
    if s > 1:
        each = w.chip_tokens * (s - 1) * 2 * a.num_kv_heads * a.head_dim / t * w.itemsize
        out.append(Exchange("all-gather", ("sequence",), 3 * n * layers, 3 * n * layers * each))
    return out
