"""The model zoo: configurations as data, and the training module each of them stands for.

Nothing here holds weights or knows hardware. Names, families and parameter counts are read without torch;
`build`, `parameter_count` and `from_config` need the `[torch]` extra and import it when they are called.
"""

from __future__ import annotations

from echograph.models.build import Built, build, parameter_count
from echograph.models.catalog import (
    ModelEntry,
    StepFlops,
    dense_flops,
    from_config,
    get_model,
    model_entries,
    model_names,
)

__all__ = [
    "Built",
    "ModelEntry",
    "StepFlops",
    "build",
    "dense_flops",
    "from_config",
    "get_model",
    "model_entries",
    "model_names",
    "parameter_count",
]
