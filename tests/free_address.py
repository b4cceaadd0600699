"""Addresses of this host at which a test can start a server, and start it again after it has ended."""

import random
import socket


def free_port():
    """The system takes the ports of other listeners and connections from a range that begins at 32768."""
    for _ in range(100):
        port = random.SystemRandom().randint(10000, 32767)
        with socket.socket() as chosen:
            try:
                chosen.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no port from 10000 to 32767 is free")


def free_address():
    return f"127.0.0.1:{free_port()}"
