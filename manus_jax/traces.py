"""`python -m manus_jax.traces NAME --n N --out F.parquet`: episodes to fine-tune on.

The oracle plays them, or with `--policy openai:MODEL@URL` a model behind OpenAI's chat API.
"""

from manus_jax import command
from manus_jax.rollout.traces import Selection, write_traces


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="python -m manus_jax.traces", description=__doc__)
    parser.add_argument("name", help="the environment, e.g. textcraft")
    parser.add_argument(
        "--n",
        type=command.number(int, at_least=1, at_most=10**6),
        required=True,
        help="the number of episodes",
    )
    parser.add_argument(
        "--out", type=command.output_file, required=True, help="the parquet file to write"
    )
    parser.add_argument(
        "--split", default="train", help="the split of the items: train (the default) or test"
    )
    parser.add_argument(
        "--seed",
        type=command.number(int, at_least=0, at_most=2**32 - 1),
        default=0,
        help="selects the items and their order",
    )
    parser.add_argument(
        "--policy", default="oracle", help="oracle, random, or openai:MODEL@URL (a chat API)"
    )
    parser.add_argument(
        "--attempts",
        type=command.number(int, at_least=1, at_most=1000),
        default=1,
        help="episodes of each item, of which the best is kept (default: 1)",
    )
    parser.add_argument(
        "--min_reward",
        type=command.number(float, at_least=-1e6, at_most=1),
        help="keep episodes with this reward or more (1 is the best); without it, successes",
    )
    args = parser.parse_args(arguments)
    if args.out.suffix != ".parquet":
        parser.error(f"--out {args.out} must end in .parquet")
    choice = Selection(args.policy, args.attempts, args.min_reward)
    write_traces(args.name, args.split, args.n, args.seed, args.out, choice)
    print(f"wrote {args.n} episodes of {args.name} to {args.out}")


if __name__ == "__main__":
    command.run(main, interrupted="no traces were written")
