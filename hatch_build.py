"""What must hold before a package is built: every folder of the namespace is a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDERS = ("frontend", "ir", "models", "profiler", "proto", "simulator")


class FolderCheck(BuildHookInterface[Any]):
    """Ends a build that would lack packages, in one line.

    In a checkout the folders are links in `src/echograph`; where Git makes none, a link is a file that holds its
    target, and a build would pack that file.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Is called by hatchling before it collects files.

        Raises:
            SystemExit: a folder is missing.
        """
        namespace = Path(self.root, "src", "echograph")
        missing = [name for name in FOLDERS if not (namespace / name / "__init__.py").is_file()]
        if missing:
            sys.exit(
                f"echograph: cannot build: {', '.join(missing)} of src/echograph: not a folder: this checkout has "
                "no links; clone it with git clone -c core.symlinks=true (on Windows, in developer mode)"
            )
