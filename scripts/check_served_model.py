"""Checks that vLLM servers serve the model that a finished run has exported, for rehearse.sh.

    VLLM_API_KEY=... python scripts/check_served_model.py --run RUN --pool DIR --model MODEL

The newest version in DIR/weights is that of the run's last step and differs from the first model;
its tensors are those of the export, bit for bit; every server in DIR/addresses holds that version
and generates what the embedded engine generates from the export.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from manus_jax.config.settings import EngineSettings
from manus_jax.engines.protocol import Generation, Request, Sampling
from manus_jax.models.loading import PolicySource, from_path
from manus_jax.rollout.build_rollout import open_engine
from manus_jax.vllm.access import read_api_key
from manus_jax.vllm.addresses import read_addresses
from manus_jax.vllm.client import VllmServer
from manus_jax.weights.manifest import label_of
from manus_jax.weights.mirror import Mirror, newest

MAX_LENGTH = 256
TOLERANCE = 1e-3  # of a log-prob in float32


def differing(versions: Path, number: int, model: Path) -> list[str]:
    """The tensors of a published version that differ from those of a model in any bit."""
    mirror = Mirror()
    mirror.advance(versions, number)
    assert mirror.store is not None
    store, tensors = mirror.store, load_file(model / "model.safetensors")
    if tensors.keys() != store.specs.keys():
        return sorted(tensors.keys() ^ store.specs.keys())
    bits = lambda array: np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return [n for n, x in tensors.items() if not np.array_equal(bits(x), bits(store.raw(n)))]


def own_generation(source: PolicySource, request: Request) -> Generation:
    settings = EngineSettings(slots=16)
    with open_engine(source, source.load(None), settings, None, MAX_LENGTH) as engine:
        return engine.submit(request).result(300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="that the run started with")
    args = parser.parse_args()
    export = max((args.run / "export").iterdir(), key=lambda path: int(path.name))
    versions = args.pool / "weights" / "versions"
    identity = newest(versions)
    if identity is None or identity.number != int(export.name):
        print(f"the newest version is {identity}, and the export is of step {export.name}")
        return 1
    if wrong := differing(versions, identity.number, export):
        print(f"version {identity.number} and {export} differ in {', '.join(wrong)}")
        return 1
    trained = differing(versions, identity.number, args.model)
    if not trained:
        print(f"version {identity.number} is still the first model, {args.model}")
        return 1
    print(f"{len(trained)} tensors were trained; version {identity.number} is equal to {export}")
    source = from_path(export)
    prompt = tuple(source.tokenizer.encode("You carry nothing. What do you do?"))
    request = Request(prompt, Sampling(max_tokens=16, temperature=0.0), 0, "check")
    own = own_generation(source, request)
    for url in read_addresses(args.pool / "addresses"):
        server = VllmServer(url, api_key=read_api_key(None))
        server.read_model()
        if server.weight_label() != label_of(identity):
            print(f"{url} holds {server.weight_label()}, not {label_of(identity)}")
            return 1
        made = server.generate(request, "check", lambda _: identity.number, None)
        error = float(np.abs(np.subtract(made.log_probs, own.log_probs)).max())
        if made.token_ids != own.token_ids or error > TOLERANCE:
            print(f"{url} answers {made.token_ids}, the export {own.token_ids}; error {error:.1e}")
            return 1
        print(
            f"{url} serves version {identity.number} and answers "
            f"{source.tokenizer.decode(made.token_ids)!r} (log-probs within {error:.1e})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
