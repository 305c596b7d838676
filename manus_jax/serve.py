"""`python -m manus_jax.serve --model DIR --port P`: a vLLM server that takes new weights.

DIR is a Hugging Face directory, or one that `manus_jax.publish` writes to, whose newest snapshot is
used. vLLM is installed in its own environment; set its interpreter with --python or
MANUS_JAX_VLLM_PYTHON. The server listens on loopback, or on a private interface with an API key
from VLLM_API_KEY or --api-key-file. When it is ready it prints "serving URL" and, with
--address-file, adds its address to the file that a pool reads. Arguments after -- are passed to
vLLM. This command does not import JAX.
"""

import sys

from manus_jax import command
from manus_jax.config.vllm_options import check_options
from manus_jax.vllm.access import KEY_VARIABLE, check_host, check_port, read_api_key
from manus_jax.vllm.gpu_partition import gpu_names
from manus_jax.vllm.server_process import (
    MAX_LORA_RANK,
    model_directory,
    run_server,
    server_command,
    server_environment,
    vllm_python,
)


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.serve", description=__doc__)
    parser.add_argument("--model", type=command.path, required=True, help="the model's directory")
    parser.add_argument(
        "--host", default="127.0.0.1", help="127.0.0.1 (the default) or a private address"
    )
    parser.add_argument(
        "--port",
        type=command.number(int, at_least=1, at_most=65535),
        default=8000,
        help="the port to listen on (default: 8000)",
    )
    parser.add_argument(
        "--max-length",
        type=command.number(int, at_least=2, at_most=2**22),
        help="the most tokens of a prompt and its generation together",
    )
    parser.add_argument(
        "--slots",
        type=command.number(int, at_least=1, at_most=2**16),
        default=64,
        help="requests that run at the same time (default: 64)",
    )
    parser.add_argument(
        "--lora-rank",
        type=command.number(int, at_least=1, at_most=MAX_LORA_RANK),
        help="take LoRA adapters up to this rank instead of whole models",
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="the type to compute in (default: that of the model's weights)",
    )
    parser.add_argument("--python", type=command.text, help="the interpreter that has vLLM")
    parser.add_argument(
        "--gpus", type=gpu_names, help="the visible GPUs, as in CUDA_VISIBLE_DEVICES: 4,5"
    )
    parser.add_argument(
        "--api-key-file",
        type=command.path,
        help=f"a file with the API key, instead of {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--address-file",
        type=command.output_file,
        help="a file that lists the server while it runs",
    )
    parser.add_argument("more", nargs="*", help="after --: vLLM's own options")
    args = parser.parse_args(arguments)
    api_key = read_api_key(args.api_key_file)
    check_host(args.host, api_key)
    check_options(args.more, "after the --")
    model = model_directory(args.model, args.max_length).absolute()
    check_port(args.host, args.port)
    python = vllm_python(args.python)
    server = server_command(
        python,
        model,
        host=args.host,
        port=args.port,
        max_length=args.max_length,
        slots=args.slots,
        dtype=args.dtype,
        keyed=api_key is not None,
        lora_rank=args.lora_rank,
        more=args.more,
    )
    adapters = args.lora_rank is not None
    environment = server_environment(python, api_key, args.gpus, adapters)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{args.port}"
    sys.exit(run_server(server, environment, url, model, args.address_file))


if __name__ == "__main__":
    command.run(main, interrupted="no server was started")
