"""Environment servers that speak AgentGym's HTTP protocol."""
