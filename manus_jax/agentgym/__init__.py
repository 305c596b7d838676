"""Clients of all AgentGym environments over HTTP: sessions, leases, retries, server processes."""
