"""What starts an engine's ranks and waits for them: ``python -m fastlayers_server.parallel.launch … FOLDER EPOCH PID``.

A rank that a signal ends, as the system does where memory runs out, cannot say so; this process tells the front.
"""

from __future__ import annotations

import logging
import sys

from fastlayers_server.torchrun import launch

log = logging.getLogger("fastlayers_server.parallel.launch")  # it runs as __main__


def tell(said: str) -> None:
    """Log why the ranks are gone, and tell the front, which is listed in this process's arguments."""
    from fastlayers_server import log as logs
    from fastlayers_server.engine.protocol import Died
    from fastlayers_server.parallel.child import send

    logs.configure("error")
    logging.disable(logging.NOTSET)  # torchrun's report is not wanted, this is
    log.error("%s", said)
    folder, epoch = sys.argv[-3], int(sys.argv[-2])
    send(folder, epoch, Died(epoch, said, restarting=True))


if __name__ == "__main__":
    raise SystemExit(launch(sys.argv[1:], tell))
