"""Traces of ByteProfile and dPRO, and what their analyzer answers of them; PyTorch's traces too, where they can.

`reader` finds and reads the files; `report` and `combine` need it alone. `dag` is the dependency graph and runs it
again, as a timeline like that of any other step; `dependencies` makes it of what was measured.
"""
