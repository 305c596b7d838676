"""`python -m manus_jax.endpoint --model DIR --port P`: OpenAI's chat API that records tokens.

DIR is a Hugging Face directory, a run, or a checkpoint of one. `engine.*` selects and configures
the engine, as in training. The server listens on loopback and prints "serving URL" when it is
ready. `POST URL/episodes` returns an API key; requests under it are recorded as one episode, which
`POST URL/episodes/end` returns as token ids, log-probs and weight versions.
"""

import signal

from manus_jax import command
from manus_jax.config.commands import read_endpoint_config
from manus_jax.models import loading
from manus_jax.rollout.build_rollout import open_engine, with_engine_settings
from manus_jax.rollout.endpoint.episode import Limits
from manus_jax.rollout.endpoint.standalone import StandaloneEndpoint
from manus_jax.rollout.llm_player import ChatTokenizer
from manus_jax.training.compilation_cache import use_compilation_cache
from manus_jax.vllm.access import check_port


def main(arguments: list[str]) -> None:
    parser = command.config_parser("endpoint", __doc__)
    parser.add_argument("--model", type=command.path, required=True, help="the model to serve")
    parser.add_argument(
        "--port",
        type=command.number(int, at_least=0, at_most=65535),
        default=8001,
        help="the port to listen on (default: 8001); 0 selects a free one",
    )
    args = parser.parse_args(arguments)
    settings = with_engine_settings(read_endpoint_config(args.gin_file, args.gin_param))
    check_port("127.0.0.1", args.port)
    rollout, engine_settings = settings.rollout, settings.engine
    source = loading.from_path(args.model)
    length = rollout.max_total_tokens
    loading.check_length(source, length, str(args.model))
    chat = ChatTokenizer(source.tokenizer, settings.chat)
    use_compilation_cache(settings.compilation)
    with open_engine(
        source, source.open(), engine_settings, settings.engine_settings, length
    ) as engine:
        endpoint = StandaloneEndpoint(engine, chat, Limits.standalone(rollout), args.port)
        try:
            print(f"serving {endpoint.url}", flush=True)
            signal.pause()
        finally:
            endpoint.close()


if __name__ == "__main__":
    command.run(main, interrupted="the endpoint has ended")
