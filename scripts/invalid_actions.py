"""The share of invalid actions of a model, per environment and action format, as a Markdown table.

    python scripts/invalid_actions.py MODEL --out DIR [--formats auto act] [--gin_param=...]

Evaluates the model once per format, with the given bindings and the environments whose servers read
the format; the results are in DIR/FORMAT, as those of `python -m manus_jax.evaluate`. An action is
invalid if the turn does not have exactly one, or if the environment refuses it.
"""

import json
from pathlib import Path

from envs import registry
from manus_jax import command, evaluate
from manus_jax.agentgym.table import environment
from manus_jax.rollout.action_formats import FORMATS, format_for

FORMAT_NAMES = ("auto", "act", "function_call", "code_as_action")


def fits(env: str, name: str) -> bool:
    try:
        format_for(environment(env), name)
    except ValueError:
        return False
    return True


def invalid_shares(
    model: str, envs: list[str], name: str, out: Path, bindings: list[str]
) -> dict[str, float]:
    """The share of invalid actions by environment."""
    bound = [
        f"evaluate.policies = [{model!r}]",
        f"evaluate.out_dir = {str(out)!r}",
        f"env.names = {envs}",
        f"rollout.action_format = {name!r}",
        *bindings,
    ]
    evaluate.main([f"--gin_param={binding}" for binding in bound])
    (played,) = json.loads((out / "evaluation.json").read_text())["policies"].values()
    return {
        env: summary["invalid_action_rate"]
        for env, summary in played["environments"].items()
        if summary["episodes"]
    }


def table(rates: dict[str, dict[str, float]], envs: list[str]) -> str:
    """`rates`: by format and environment."""
    rows = [["environment", *(f"`{name}`" for name in rates)], ["---"] * (1 + len(rates))]
    for env in envs:
        found = (rates[name].get(env) for name in rates)
        rows.append([env, *("–" if rate is None else f"{rate:.0%}" for rate in found)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: list[str]) -> None:
    parser = command.Parser(prog="invalid_actions.py", description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=command.text, help="a policy of evaluate.policies")
    parser.add_argument("--out", type=command.output_directory, required=True)
    parser.add_argument("--envs", nargs="+", choices=sorted(registry.ENVIRONMENTS))
    parser.add_argument("--formats", nargs="+", choices=["auto", *FORMATS], default=FORMAT_NAMES)
    parser.add_argument("--gin_param", action="append", default=[], help="as for evaluate")
    args = parser.parse_args(arguments)
    envs = args.envs or sorted(registry.ENVIRONMENTS)
    rates = {}
    for name in args.formats:
        playable = [env for env in envs if fits(env, name)]
        rates[name] = invalid_shares(args.model, playable, name, args.out / name, args.gin_param)
    print(table(rates, envs))


if __name__ == "__main__":
    command.run(main, interrupted="the results of finished formats remain")
