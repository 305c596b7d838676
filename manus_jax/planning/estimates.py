"""FLOPs, memory and communication of an update, from the sizes of model, batch and mesh.

FLOPs are exact counts of the matrix products in models/transformer.py and of the attention kernels.
Memory and communication are estimates; a compiled plan uses the compiler's figures.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

from manus_jax.models.architecture import Architecture
from manus_jax.models.grouped_product import LARGEST_BLOCK
from manus_jax.models.log_probs import chunk_size

COMPILED_TO_ESTIMATED = (0.75, 1.4)
"""The range of compiled over estimated temporaries, in the plans of docs/planning.md and of the
headers of configs/hardware/."""

# The products that the backward pass computes again, by remat policy (models/transformer.py).
_RECOMPUTED = {
    "full": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "in_place": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "offload": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"),
    "attention": ("o_proj", "gate_proj", "up_proj"),
    "minimal": (),
    "none": (),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """One update of one model.

    `trained` is the share of agent tokens, `shards` the size of each mesh axis, `itemsize` the
    bytes of a number in the compute type. With LoRA, a layer has `adapters` trained parameters, and
    all others are frozen, in the compute type. The optimizer is AdamW unless it is `adafactor`.
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
    adapters: int = 0
    adafactor: bool = False

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
    def recomputes_attention(self) -> bool:
        return "q_proj" in _RECOMPUTED[self.remat]

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
    def active_parameters(self) -> float:
        """Parameters of the matrices of one layer that a token is multiplied with."""
        return sum(_active(self.arch).values())

    @property
    def mlp_width(self) -> float:
        """Numbers per token and chip in a hidden array of the MLP.

        With experts, every chip has room for all experts of its tokens, because all of them may be
        its own.
        """
        a = self.arch
        return a.intermediate_size * (a.experts_per_token or 1 / self.tensor)

    @property
    def head_parameters(self) -> int:
        return self.arch.vocab_size * self.arch.hidden_size if self.has_lm_head else 0


def _matrices(arch: Architecture) -> dict[str, int]:
    """Sizes of the matrices of one layer; those of experts under the names of a dense MLP's."""
    return {
        re.sub(r"^expert_(\w+)", r"\1_proj", name): math.prod(shape)
        for name, shape in arch.layer_shapes.items()
        if name.endswith("_proj") or name.startswith(("expert_", "router"))
    }


def _active(arch: Architecture) -> dict[str, float]:
    """The part of each matrix that a token is multiplied with."""
    of_experts = ("gate_proj", "up_proj", "down_proj")
    return {
        n: x * (arch.active_share if n in of_experts else 1) for n, x in _matrices(arch).items()
    }


def attention_flops(w: Workload) -> float:
    """FLOPs of the forward attention products, for rows of one causal segment each."""
    window = min(w.length, w.arch.sliding_window or w.length)
    local = sum(w.arch.local_layers)
    # Twice the mean number of keys of a token: the last tokens of a row have a full window.
    keys = (w.arch.num_layers - local) * w.length + local * window * (2 - window / w.length)
    return 2.0 * w.arch.num_heads * w.arch.head_dim * keys * w.tokens


def model_flops(w: Workload) -> float:
    """FLOPs of the whole update without recomputation: 6 per parameter and token, and attention.

    Of the experts, those of a token count. A frozen parameter has no gradient and counts 4. The
    embedding is a lookup and does not count; the LM head counts for trained tokens only.
    """
    each = _flops_per_weight(w)
    layers = w.arch.num_layers * (each * w.active_parameters + 6.0 * w.adapters) * w.tokens
    return layers + each * w.head_parameters * w.trained * w.tokens + 3 * attention_flops(w)


def _flops_per_weight(w: Workload) -> float:
    return 4.0 if w.adapters else 6.0


def executed_flops(w: Workload) -> float:
    """FLOPs of one chip, including remat and the second projection of the LM head.

    The backward kernels of attention compute the scores twice: 7 products instead of 4.
    """
    again = sum(_active(w.arch)[name] for name in _RECOMPUTED[w.remat])
    each = _flops_per_weight(w)
    products = each * w.active_parameters + 6.0 * w.adapters + 2.0 * again
    layers = w.arch.num_layers * products * w.tokens
    head = (each + 2) * w.head_parameters / w.tensor * w.micro_batches * w.chunks * w.chunk
    kernels = (2 + 7 + (2 if w.recomputes_attention else 0)) / 2
    return (layers + kernels * attention_flops(w)) / w.chips + head


def saved_per_token(w: Workload) -> float:
    """Bytes per token that one layer keeps for the backward pass on one chip."""
    a, d = w.arch, w.arch.hidden_size
    attention = d + 2 * (a.num_heads + a.num_kv_heads) * a.head_dim / w.tensor
    minimal = attention + 2 * w.mlp_width + 2 * d
    # Without remat: also norms in float32, rotated queries and keys, the gated product.
    numbers = {
        "full": d,
        "in_place": d,
        "offload": 0.0,  # in host memory
        "attention": attention,
        "minimal": minimal,
        "none": 2 * minimal + 4 * d,
    }
    return numbers[w.remat] * w.itemsize


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of temporaries on one chip, besides the accumulated gradients.

    `copies` are the parameters in the compute type and their gradients, `layer` the arrays in use
    while one layer is computed, `experts` the blocks of a mixture of experts, `head` and
    `embedding` those of the vocabulary matrices. The step of the optimizer comes afterwards and
    needs `optimizer`.
    """

    copies: float
    activations: float
    layer: float
    experts: float
    head: float
    embedding: float
    optimizer: float

    @property
    def total(self) -> float:
        # The layers run before and after the head, but compilers let the two overlap in part.
        arrays = max(self.layer, self.head) + min(self.layer, self.head) / 2
        passes = self.copies + self.activations + arrays + self.experts + self.embedding
        return max(passes, self.optimizer)


def estimate_temporaries(w: Workload, platform: str) -> MemoryEstimate:
    """The temporaries of an update; see `COMPILED_TO_ESTIMATED`."""
    a, tokens, tpu = w.arch, w.chip_tokens, platform == "tpu"
    layer, vocabulary = w.layer_parameters / w.tensor, a.vocab_size * a.hidden_size / w.tensor
    tied = w.has_lm_head and a.tie_embeddings
    matrices = a.num_layers * layer + vocabulary * (2 if w.has_lm_head and not tied else 1)
    full, trained = not w.adapters, a.num_layers * layer
    if not full:
        matrices = trained = a.num_layers * w.adapters / w.tensor
    in_place, clipped = full and w.remat == "in_place", 0 if w.adafactor else 1
    return MemoryEstimate(
        copies=0.0 if in_place else 2 * trained / w.parameter_shards * w.itemsize,
        activations=a.num_layers * saved_per_token(w) * tokens,
        # Also the gathered weights of this and the next layer, and the weight gradients before
        # they are scattered.
        layer=2 * _layer_arrays(w, 4 if tpu else w.itemsize) + (2 + full) * layer * w.itemsize,
        experts=0.0 if tpu else _expert_blocks(w),
        head=_head_arrays(w) + 4 * vocabulary * full if w.has_lm_head else 0.0,
        # The TPU compiler sums the gradient of the whole embedding.
        embedding=4 * vocabulary if tpu and full and not tied else 0.0,
        # The clipped gradients, and the changes in the layout of the parameters. On a single
        # device there is no other layout, and compilers clip in Adafactor's own operations.
        optimizer=4 * matrices / w.parameter_shards * (2 if w.parameter_shards > 1 else clipped),
    )


def estimate_forward(w: Workload, platform: str) -> float:
    """Bytes of the temporaries of a forward pass."""
    layer = w.layer_parameters / w.tensor
    copied = 0 if w.adapters else w.arch.num_layers / w.parameter_shards  # frozen ones are not
    weights = (copied + 2) * layer * w.itemsize
    arrays = _layer_arrays(w, 4 if platform == "tpu" else w.itemsize)
    return weights + arrays + (_head_arrays(w) if w.has_lm_head else 0.0)


def _layer_arrays(w: Workload, itemsize: int) -> float:
    """Bytes of the arrays of a layer in use at a time; the TPU compiler keeps them in float32."""
    a = w.arch
    heads = (a.num_heads + a.num_kv_heads) * a.head_dim / w.tensor
    sorted_tokens = 2 * a.experts_per_token * a.hidden_size
    wide = 2 * heads + 3 * w.mlp_width + sorted_tokens + 2 * a.hidden_size
    return w.chip_tokens * (wide * itemsize + 1.5 * a.hidden_size * 4)


def _expert_blocks(w: Workload) -> float:
    """Bytes of the matrices of all blocks, their gradients, and the sums of these over blocks."""
    a, experts = w.arch, w.arch.num_experts / w.tensor
    if not experts:
        return 0.0
    blocks = a.experts_per_token * w.chip_tokens / LARGEST_BLOCK + experts
    return 3 * a.hidden_size * a.intermediate_size * (blocks * (w.itemsize + 4) + experts * 4)


def _head_arrays(w: Workload) -> float:
    """Bytes of the gathered LM head, the logits of a chunk, and the hidden states in float32."""
    weights = w.head_parameters / w.tensor * w.itemsize
    logits = 3 * w.chunk * w.arch.vocab_size / w.tensor * 4
    return weights + logits + 2 * w.chip_tokens * w.arch.hidden_size * 4


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
    if w.adapters:
        gradients = layers * w.adapters / w.tensor * w.itemsize
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
        times = n * layers * (4 + (2 if w.recomputes_attention else 1))
        each = 2 * w.chip_tokens * a.hidden_size * w.itemsize * ring(t)
        out.append(Exchange("all-reduce", ("tensor",), times, times * each))
    if s > 1:
        each = w.chip_tokens * (s - 1) * 2 * a.num_kv_heads * a.head_dim / t * w.itemsize
        out.append(Exchange("all-gather", ("sequence",), 3 * n * layers, 3 * n * layers * each))
    return out
