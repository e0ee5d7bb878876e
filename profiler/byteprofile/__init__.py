"""Traces of ByteProfile and dPRO, and what their analyzer answers of them; PyTorch's traces too, where they can.

`layout` finds the files and `events` reads them. `statistics` and `combine` need these alone; `dag` and
`dependencies` are about the dependency graph, and `output` writes workbooks and charts.
"""
