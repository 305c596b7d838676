"""HTTP clients for all AgentGym environments: sessions, leases, retries, server processes."""
