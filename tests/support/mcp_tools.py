"""An MCP server with two tools, and a reward for its tasks."""

import sys


def serve() -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sums")
    total = 0

    @server.tool(name="add-number")
    def add_number(number: int, note: str = "") -> int:
        """Adds a number to the total."""
        nonlocal total
        total += number
        return total

    @server.tool()
    def divide(by: int) -> float:
        """Divides the total."""
        return total / by

    server.run()


def register() -> None:
    from manus_jax.rewards import REWARDS

    @REWARDS.register("adds")
    def adds(solution_str, ground_truth, *, turns, **facts):
        """1 if a turn has led to the total that the task asks for."""
        return float(any(f"Observation: {ground_truth}\n" in turn.observation for turn in turns))


if __name__ == "__main__":
    serve()
elif "manus_jax" in sys.modules:
    register()
