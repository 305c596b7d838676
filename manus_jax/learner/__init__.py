"""Mesh and sharding rules, packing, train state and the compiled update step."""
