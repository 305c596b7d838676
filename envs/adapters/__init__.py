"""Environments of other packages, served like those of this one.

A name such as `gym:FrozenLake-v1` is the name of an adapter and what it adapts
(`envs.registry.ADAPTERS`). An adapter is a function that makes an `EnvironmentSpec` of the latter;
its `client` field has what is otherwise in a row of the client's table and in a prompt file.
"""
