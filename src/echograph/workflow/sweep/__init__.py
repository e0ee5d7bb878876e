"""One prediction for each point of a grid: `sweep`.

`grid` says which points there are, `store` keeps what is finished, whatever happens to the process, and `run` asks
for what is missing.
"""

from echograph.workflow.sweep.run import Sweep, sweep

__all__ = ["Sweep", "sweep"]
