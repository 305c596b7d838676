"""Mesh and sharding rules, packing, train state, and the one compiled update step."""
