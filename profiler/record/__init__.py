"""A window of steps of a running PyTorch job, recorded into one folder a rank.

recorder.py is what a user starts: it says which steps are meant and where they end, and drives PyTorch's profiler;
dependencies.py makes the graph of what depends on what and how long that took, overhead.py measures what recording
costs, folder.py knows the files, compare.py holds a recording against a captured graph.
"""

from __future__ import annotations
