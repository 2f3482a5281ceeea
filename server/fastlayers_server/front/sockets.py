"""The address of a server, taken before anything heavy is imported."""

from __future__ import annotations

import socket


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; raises ``OSError`` if the address is taken or is none of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
