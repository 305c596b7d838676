"""`python -m manus_jax.publish RUN --to DIR`: a run's checkpoints as versions for vLLM servers.

Publishes the newest checkpoint; --follow also publishes every new one until the command is stopped.
Servers given with --server load each version, and with --follow a server that is restarted loads
the newest one again. VLLM_API_KEY holds the servers' key.
"""

import functools

from manus_jax import command
from manus_jax.vllm.publishing import publish_to_servers


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.publish", description=__doc__)
    parser.add_argument("run", type=command.path, help="a run directory")
    parser.add_argument(
        "--to", type=command.output_directory, required=True, help="the directory of the versions"
    )
    parser.add_argument("--follow", action="store_true", help="publish every new checkpoint")
    parser.add_argument(
        "--poll",
        type=command.number(float, at_least=0.01, at_most=10**6),
        help="seconds between checks for a new checkpoint with --follow (default: 2)",
    )
    parser.add_argument(
        "--snapshot-every",
        type=command.number(int, at_least=1, at_most=10**6),
        default=20,
        help="versions between two full snapshots (default: 20)",
    )
    parser.add_argument(
        "--server",
        type=command.url,
        action="append",
        default=[],
        help="a vLLM server's URL; may be repeated",
    )
    args = parser.parse_args(arguments)
    if args.poll is not None and not args.follow:
        parser.error("--poll is for --follow")
    poll = (args.poll or 2.0) if args.follow else None
    report = functools.partial(print, flush=True)
    publish_to_servers(args.run, args.to, poll, args.snapshot_every, args.server, report)


if __name__ == "__main__":
    command.run(main, interrupted="published versions remain; the same command continues")
