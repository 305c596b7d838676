"""Opens the environments of a run, on embedded servers started here or on given addresses.

    with open_environments({"textcraft": "embedded", "webshop": ["http://node7:36001"]}) as pool:
        with pool.lease("textcraft") as session:
            observation = session.reset(0)

All errors in the choice of servers (an unknown name, a missing or wrong server) are detected and
reported together before the first process starts.
"""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from envs.registry import ADAPTERS, load
from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.connection import Connection, authorization, server_root
from manus_jax.agentgym.failures import EnvironmentFailure
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.prompts import PROMPTS, EnvironmentPrompt
from manus_jax.agentgym.rewards import RewardKind, RewardRule
from manus_jax.agentgym.table import ENVIRONMENTS, ActionStyle, EnvironmentRow, environment
from manus_jax.agentgym.tools import tool_from_schema
from manus_jax.config.server_settings import EnvPoolSettings
from manus_jax.servers.processes import (
    ServerCommand,
    ServerSetupError,
    ServerSupervisor,
    SupervisorSettings,
)

Servers = str | Sequence[str]
"""The word "embedded", or the addresses of AgentGym servers."""


@contextmanager
def open_environments(
    servers: Mapping[str, Servers],
    servers_per_env: int = 1,
    settings: EnvPoolSettings | None = None,
    supervision: SupervisorSettings | None = None,
    interpreters: Mapping[str, str] | None = None,
) -> Iterator[EnvironmentPool]:
    """A pool over the chosen servers; embedded servers end with the block.

    `interpreters` run the embedded servers of some environments, or of all of an adapter, instead
    of this program's.
    Raises ValueError for an invalid choice and ServerSetupError for servers that cannot be used.
    """
    if servers_per_env < 1:
        raise ValueError(f"servers_per_env must be at least 1, not {servers_per_env}")
    authorization()  # an unusable key is reported before anything starts
    given = {env: server_addresses(env, choice) for env, choice in servers.items()}
    settings = settings or EnvPoolSettings()
    check_servers({env: urls for env, urls in given.items() if urls}, settings)

    started = [env for env, urls in given.items() if not urls for _ in range(servers_per_env)]
    python = interpreters or {}
    supervisor = ServerSupervisor(
        [
            embedded_server(env, python=python.get(env) or python.get(env.partition(":")[0]))
            for env in started
        ],
        supervision or SupervisorSettings(startup_timeout=settings.startup_timeout),
    )
    pool = EnvironmentPool(given, settings, on_broken=supervisor.replace)
    supervisor.on_serving = pool.put_server
    supervisor.on_given_up = pool.drop_server
    try:
        supervisor.start()
        with pool:
            yield pool
    finally:
        supervisor.stop()


def register_environment(
    row: EnvironmentRow, prompt: EnvironmentPrompt, spec: str | None = None
) -> None:
    """Adds an environment from outside this project, under the name of its row.

    A module that calls this function is imported by the configuration (`import my_env` in a gin
    file). `spec` is the location of the EnvironmentSpec, as "my_env:SPEC"; without it, the
    environment can only be played on the servers of `env.urls`.
    """
    if spec is not None and not all(spec.partition(":")):
        raise ValueError(f"{row.name}: spec {spec!r} must have the form 'module:SPEC'")
    ENVIRONMENTS.add(row)
    PROMPTS[row.name] = prompt
    if spec is not None:
        EMBEDDED[row.name] = spec


def register_adapted(name: str) -> None:
    """Registers an environment of another package, such as gym:FrozenLake-v1, if it is one.

    Raises UnknownEnvironment if its adapter cannot make it.
    """
    if name in ENVIRONMENTS or name.partition(":")[0] not in ADAPTERS:
        return
    client = load(name).client
    assert client is not None
    rule = RewardRule(RewardKind.CUMULATIVE, low=client.low, high=client.high, clip=True)
    tools = tuple(tool_from_schema(t.name, t.description, t.parameters) for t in client.tools)
    style: ActionStyle = "tool_call" if tools else "line"
    row = EnvironmentRow(
        name,
        id_field="id",
        port=36001,
        item_field="data_idx",
        reward=rule,
        action=style,
        closes=True,
        read_timeout=client.read_timeout,
    )
    prompt = EnvironmentPrompt(client.instruction, client.actions, (), tools)
    register_environment(row, prompt, spec=name)


def embedded_server(env: str, port: int = 0, python: str | None = None) -> ServerCommand:
    """The command of a server in `envs/`; port 0 selects a free port.

    Another interpreter, `python`, finds this project through PYTHONPATH; it needs the packages of
    the environment and of the server only.
    """
    parent = str(os.getpid())
    arguments = (EMBEDDED.get(env, env), "--port", str(port), "--parent_pid", parent)
    prefix = ENVIRONMENTS[env].prefix if env in ENVIRONMENTS else ""
    if python is None:
        return ServerCommand(env, "envs.serve", arguments, prefix=prefix)
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return ServerCommand(env, "envs.serve", arguments, variables, prefix, python=python)


def check_interpreters(interpreters: Mapping[str, str]) -> None:
    """Raises ServerSetupError for an interpreter that cannot run an environment server."""
    for env, python in interpreters.items():
        command = [python, "-c", "import fastapi, httptools, uvicorn; print('can serve')"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            if done.returncode == 0:
                problem = "" if "can serve" in done.stdout else "it is not a Python interpreter"
            else:
                last = done.stderr.strip().rpartition("\n")[2]
                problem = last or f"it ends with status {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
        if problem:
            raise ServerSetupError(
                f"env.python: {python} cannot serve {env}: {problem}; "
                f"`scripts/setup_env.sh {env.partition(':')[0]}` creates an interpreter that can"
            )


def check_servers(addresses: Mapping[str, Sequence[str]], settings: EnvPoolSettings) -> None:
    """Raises one ServerSetupError that names all servers that do not serve their environment."""

    def problem(env: str, address: str) -> str | None:
        connection = Connection(environment(env), server_root(environment(env), address), settings)
        try:
            connection.check_routes()
        except EnvironmentFailure as failure:
            return str(failure)
        finally:
            connection.close()
        return None

    pairs = [(env, url) for env, urls in addresses.items() for url in urls]
    if not pairs:
        return
    with ThreadPoolExecutor(min(16, len(pairs))) as threads:
        problems = [line for line in threads.map(lambda pair: problem(*pair), pairs) if line]
    if problems:
        raise ServerSetupError("these environment servers cannot be used:\n" + "\n".join(problems))


def check_items(urls: Mapping[str, Servers], settings: EnvPoolSettings, purpose: str) -> None:
    """Raises ServerSetupError unless all servers have the items of this project's environments.

    AgentGym's servers number other tasks, in most environments. `purpose` says in the message what
    needs the items.
    """
    for env, choice in urls.items():
        row = environment(env)
        advice = f"list the servers' own tasks in files, e.g. {env}_0 and {env}_1"
        if row.items is not None:
            advice += f" (AgentGym has {row.items.start}..{row.items.stop - 1})"
        if env not in EMBEDDED:
            raise ServerSetupError(f"{purpose}: this project has no tasks of {env}; {advice}")
        for url in [] if row.shares_items else server_addresses(env, choice):
            connection = Connection(row, url, settings)
            try:
                own_items = connection.check().own_items
            except EnvironmentFailure as failure:
                raise ServerSetupError(str(failure)) from None
            finally:
                connection.close()
            if not own_items:
                raise ServerSetupError(
                    f"{purpose}: the server {url} has other items of {env} than this project; "
                    f"{advice}, or use servers of `python -m envs.serve {env}`, whose tasks "
                    f"`python -m envs.items {env} --out DIR` writes"
                )


def server_addresses(env: str, choice: Servers) -> list[str]:
    """The given addresses in their full form; empty for "embedded"."""
    row = environment(env)
    if choice == "embedded":
        if env not in EMBEDDED:
            embedded = ", ".join(sorted(EMBEDDED))
            raise ValueError(
                f"{env!r} has no embedded server; list the URLs of AgentGym servers for it "
                f"(embedded are {embedded})"
            )
        return []
    addresses = [choice] if isinstance(choice, str) else choice
    if not isinstance(addresses, Sequence) or not all(isinstance(url, str) for url in addresses):
        raise ValueError(f"{env}: {choice!r} is not a list of URLs")
    if not addresses:
        raise ValueError(f'{env}: no servers; write "embedded" or a list of URLs')
    return [server_root(row, address) for address in addresses]
