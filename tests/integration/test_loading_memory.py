"""Peak memory of the commands that read a whole model, of which they hold one tensor at a time.

Every command runs in its own process, first on a tiny model and then on a large one. The process
reports by how much the second run raises the peak of its resident memory (ru_maxrss).
"""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from manus_jax.models.architecture import Architecture, to_hf_config
from manus_jax.models.huggingface import tensor_map

# 300 MB in bfloat16; the largest stack, of 12 matrices, has a quarter of them.
LARGE = Architecture("qwen2", 4096, 1024, 3072, 12, 8, 2, 128, qkv_bias=True)
SLACK = 64 * 2**20  # buffers of threads, which do not grow with the model
FILES = ("model-0.safetensors", "model-1.safetensors")
TINY = Architecture("qwen2", 64, 32, 64, 2, 2, 2, 16, qkv_bias=True)

MEASURE = """
import contextlib, os, resource, sys
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = ""
from pathlib import Path
from manus_jax.models import conversion
from manus_jax.vllm import publishing
from manus_jax.engines.jax_engine import JaxEngine
from manus_jax.engines.protocol import Request, Sampling
from manus_jax.models import huggingface
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
for root in map(Path, sys.argv[1:]):
    before = peak()
    {body}
print(peak() - before)
"""


def make_model(root, arch):
    """A bfloat16 model in `root/hf`, of two files."""
    rng = np.random.default_rng(0)
    tensors = {
        name: (0.02 * rng.standard_normal(shape, np.float32)).astype(ml_dtypes.bfloat16)
        for name, _, _, shape in tensor_map(arch)
    }
    (root / "hf").mkdir(parents=True)
    (root / "hf" / "config.json").write_text(json.dumps(to_hf_config(arch, "bfloat16")))
    files = {name: f"model-{len(name) % 2}.safetensors" for name in tensors}
    for file in FILES:
        chosen = {name: x for name, x in tensors.items() if files[name] == file}
        save_file(chosen, root / "hf" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    base = tmp_path_factory.mktemp("memory")
    for name, arch in (("tiny", TINY), ("large", LARGE)):
        make_model(base / name, arch)
    return base / "tiny", base / "large"


def peak_of(body, roots):
    run = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("{body}", body), *map(str, roots)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout.split()[-1])


def test_convert_and_publish_hold_one_tensor_at_a_time(roots):
    size, large = 2 * LARGE.num_params, roots[1]
    # A whole stack in float32 is half of the model's size in bfloat16.
    assert peak_of('conversion.from_hf(root / "hf", root / "run")', roots) <= 1.3 * size + SLACK
    assert peak_of('conversion.to_hf(root / "run", root / "back")', roots) <= 0.3 * size + SLACK
    for file in FILES:
        assert (large / "back" / file).read_bytes() == (large / "hf" / file).read_bytes()
    # The publisher keeps a copy of the last version in a mapped file.
    publish = 'list(publishing.publish_run(root / "run", root / "to"))'
    assert peak_of(publish, roots) <= 1.3 * size + SLACK


ENGINE = """
    params, card = huggingface.open_params(root / "hf")
    with contextlib.closing(JaxEngine(card.architecture, params, slots=16, max_length=128)) as e:
        e.submit(Request((1, 2, 3), Sampling(max_tokens=2), 0, "s")).result()
"""


def test_an_engine_holds_a_single_copy_in_its_own_type(roots):
    assert peak_of(ENGINE, roots) <= 1.3 * 4 * LARGE.num_params + SLACK
