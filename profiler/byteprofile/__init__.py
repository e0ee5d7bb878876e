"""Traces of ByteProfile and dPRO, and what their analyzer answers of them; PyTorch's traces too, where they can.

`layout` finds the files, `read` takes them apart, `names` says what events are of, and `events` holds them as
columns. `statistics`, `combine`, `collect` and `mapping` need these alone; `dag`, `dependencies`, `compose` and
`replay` are about the dependency graph.
"""
