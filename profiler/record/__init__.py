"""A window of steps of a running PyTorch job, recorded into one folder a rank.

recorder.py is what a user starts, and says when what is on; window.py which steps are meant; steps.py finds where
they end, profile.py drives PyTorch's profiler, operators.py and dependencies.py make the graph of what depends on
what, durations.py says how long that took, folder.py knows the files, compare.py holds a recording against a
captured graph.
"""

from __future__ import annotations
