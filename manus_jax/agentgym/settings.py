"""One setting decides where an environment is played: on servers of our own or on given ones.

    with open_environments({"textcraft": "embedded", "webshop": ["http://node7:36001"]}) as pool:
        with pool.lease("textcraft") as session:
            view = session.reset(0)

The one idea: every mistake in the setting (a name, a server that is not there or not the right
one) is found and reported together before the first process starts.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from envs.registry import ENVIRONMENTS as EMBEDDED
from manus_jax.agentgym.client import Connection, Timeouts, server_root
from manus_jax.agentgym.failures import EnvironmentFailure, EnvironmentSetupError
from manus_jax.agentgym.leases import PoolSettings
from manus_jax.agentgym.pool import EnvironmentPool
from manus_jax.agentgym.processes import ProcessSettings, ServerSupervisor
from manus_jax.agentgym.table import environment

Servers = str | Sequence[str]
"""The word "embedded", or the addresses of AgentGym servers."""


@contextmanager
def open_environments(
    servers: Mapping[str, Servers],
    servers_per_env: int = 1,
    pool_settings: PoolSettings | None = None,
    process_settings: ProcessSettings | None = None,
) -> Iterator[EnvironmentPool]:
    """A pool over the chosen servers; those it started itself end with the block.

    ValueError for a setting that cannot be meant, EnvironmentSetupError for servers that are not
    there.
    """
    if servers_per_env < 1:
        raise ValueError(f"servers_per_env must be at least 1, not {servers_per_env}")
    given = {env: _addresses(env, choice) for env, choice in servers.items()}
    settings = pool_settings or PoolSettings()
    check_servers({env: urls for env, urls in given.items() if urls}, settings.timeouts)

    counts = {env: servers_per_env for env, urls in given.items() if not urls}
    supervisor = ServerSupervisor(counts, process_settings)
    pool = EnvironmentPool(given, settings, on_broken=supervisor.replace)
    supervisor.on_serving = pool.put_server
    supervisor.on_given_up = pool.drop_server
    try:
        supervisor.start()
        with pool:
            yield pool
    finally:
        supervisor.stop()


def check_servers(addresses: Mapping[str, Sequence[str]], timeouts: Timeouts) -> None:
    """Every server answers and serves its environment; else one error names all that do not."""

    def problem(env: str, address: str) -> str | None:
        connection = Connection(environment(env), server_root(environment(env), address), timeouts)
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
        raise EnvironmentSetupError(
            "these environment servers cannot be used:\n" + "\n".join(problems)
        )


def _addresses(env: str, choice: Servers) -> list[str]:
    """The given addresses in their full form; empty for "embedded"."""
    row = environment(env)
    if choice == "embedded":
        if env not in EMBEDDED:
            ours = ", ".join(sorted(EMBEDDED))
            raise ValueError(
                f"{env!r} has no embedded server; list the URLs of AgentGym servers for it "
                f"(embedded are {ours})"
            )
        return []
    addresses = [choice] if isinstance(choice, str) else list(choice)
    if not addresses:
        raise ValueError(f'{env}: no servers; write "embedded" or a list of URLs')
    return [server_root(row, address) for address in addresses]
