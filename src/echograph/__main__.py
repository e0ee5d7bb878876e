"""`python -m echograph`: the version and the commands; with the name of one behind it, that command."""

from __future__ import annotations

import sys

from echograph import __version__
from echograph.cli import echoc, echoprof, echosim
from echograph.cli.app import end_with
from echograph.cli.output import print_error, print_line
from echograph.errors import UnknownNameError

COMMANDS = {str(app.info.name): app for app in (echoc.app, echosim.app, echoprof.app)}


def main() -> None:
    """Prints a line for the package and one for each command, or runs the command that is named."""
    asked = sys.argv[1:2]
    if asked in ([], ["--help"], ["--version"]):
        print_line(f"echograph {__version__}")
        for name, app in COMMANDS.items():
            print_line(f"{name:8}  {app.info.help}")
    elif asked[0] in COMMANDS:
        sys.argv = sys.argv[1:]
        end_with(COMMANDS[asked[0]], asked[0])
    else:
        error = UnknownNameError("command", asked[0], COMMANDS)
        print_error(f"echograph: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
