"""Published adapters: which directories exist, and what is compared with a server's base."""

import jax
import numpy as np
import pytest
from published_models import ARCH, CARD, model

from manus_jax.models import huggingface
from manus_jax.models.adapter_files import (
    Adaptation,
    AdapterWeights,
    fingerprint,
    fingerprint_of_tensors,
    read_adapter,
)
from manus_jax.models.architecture import Architecture
from manus_jax.models.families import FAMILIES
from manus_jax.models.lora import Lora
from manus_jax.models.transformer import Compute, Transformer, init_adapters, init_params
from manus_jax.weights.adapters import AdapterPublisher
from manus_jax.weights.manifest import label_of

LORA = Lora(2, 4.0, ("q_proj", "down_proj"))
ADAPTATION = Adaptation(LORA, "/base", fingerprint(model()))
MIXTURE = Architecture(
    *("qwen3_moe", 64, 32, 48, 3, 4, 2, 8),
    num_experts=4,
    experts_per_token=2,
    **FAMILIES["qwen3_moe"].switches,
)


def published(publisher, *versions):
    """The labels of new versions, whose adapters are all the version."""
    shapes = init_adapters(Transformer, ARCH, LORA, 0)
    labels = []
    for version in versions:
        adapters = jax.tree.map(lambda x: np.full(x.shape, version, np.float32), shapes)  # noqa: B023
        weights = AdapterWeights(adapters, ADAPTATION, publisher.root)
        labels.append(label_of(publisher.publish(weights, version).identity))
    return labels


def test_old_adapters_are_removed_when_no_request_uses_them(tmp_path):
    publisher = AdapterPublisher(tmp_path, CARD, ADAPTATION)
    kept = lambda: {path.name for path in tmp_path.glob("[0-9]*")}
    first, _ = published(publisher, 1, 2)
    publisher.used[first] += 1
    third, fourth = published(publisher, 3, 4)
    assert kept() == {first, third, fourth}
    read = read_adapter(tmp_path / first, LORA, ARCH)
    assert all((x == 1).all() for x in jax.tree.leaves(read))
    publisher.used[first] -= 1
    (fifth,) = published(publisher, 5)
    assert kept() == {fourth, fifth}
    publisher.close()
    publisher = AdapterPublisher(tmp_path, CARD, ADAPTATION)  # of the next process
    assert kept() == set()
    publisher.close()


def checksum(array):
    """Bit by bit: the sum of each value's upper 16 bits times an odd number per axis."""
    total, bits = 0, np.asarray(array.astype("bfloat16")).view(np.uint16)
    for place, value in np.ndenumerate(bits):
        factor = 1
        for i in place:
            factor = factor * (2 * i + 1) * 2654435761 % 2**32
        total += int(value) * factor
    return total % 2**32


@pytest.mark.parametrize("arch", [ARCH, MIXTURE], ids=["dense", "mixture"])
def test_the_tensors_of_a_directory_have_the_fingerprint_of_the_parameters(arch):
    params = init_params(Transformer, arch, Compute(), 0)
    checksums = {}
    for name, path, index, _ in huggingface.tensor_map(arch):
        array = params
        for key in path:
            array = array[key]
        checksums[name] = checksum(np.asarray(array)[index])
    assert fingerprint_of_tensors(checksums, arch) == fingerprint(params)
    name = min(checksums)
    assert fingerprint_of_tensors({**checksums, name: 1}, arch) != fingerprint(params)
    del checksums[name]
    assert fingerprint_of_tensors(checksums, arch) != fingerprint(params)
