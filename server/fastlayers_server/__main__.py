"""Where a process of the command ``fastlayers`` begins, by its script or ``python -m fastlayers_server``."""

from __future__ import annotations

import signal


def main() -> None:
    """Import the command, and run it.

    Importing takes seconds, in which Python would answer a terminal's Ctrl-C with a traceback of whatever is imported
    just then, or lose it there. So until then it ends the process as it ends any other.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody wants it to go on
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastlayers_server import cli

    if usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
