"""Two servers behind a router are killed by turns, again and again, while clients ask.

    python3 tests/route_faults_test.py PATH_OF_TANDEM [SECONDS]

Every whole answer arrives; every stream begins, and ends regularly or with an error event.
"""
import collections
import subprocess
import sys
import threading
import time
import unittest

from free_address import free_port
from running_router import Router, until
from running_server import TANDEM

SECONDS = float(sys.argv[2]) if len(sys.argv) > 2 else 15
N_CLIENTS = 8


def serve(port):
    return subprocess.Popen([TANDEM, "serve", "-q", "--port", str(port), "--threads", "1"])


class Faults(unittest.TestCase):
    def test_killed_servers(self):
        ports = [free_port(), free_port()]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        servers = [serve(port) for port in ports]
        router = Router(backends=urls).wait_up(*urls)
        over, seen, n_kills = threading.Event(), collections.Counter(), 0

        def ask(client):
            for n in range(10**9):
                if over.is_set():
                    return
                request = {"prompt": f"{client} {n} " + "7 " * 60, "max_tokens": 20, "ignore_eos": True}
                try:
                    if client % 2:
                        status, answer = router.post("/v1/completions", request)
                        seen["whole" if status == 200 else f"{status} {answer}"] += 1
                    else:
                        events = list(router.events("/v1/completions", {**request, "stream": True}))
                        began, failed = "choices" in events[0], "error" in events[-1]
                        seen[("broken" if failed else "ended") if began else f"not begun: {events}"] += 1
                except Exception as error:  # pylint: disable=broad-except
                    seen[repr(error)] += 1
        clients = [threading.Thread(target=ask, args=(i,)) for i in range(N_CLIENTS)]
        for client in clients:
            client.start()
        deadline = time.time() + SECONDS
        while time.time() < deadline:
            which = n_kills % 2
            servers[which].kill()
            servers[which].wait()
            n_kills += 1
            router.wait_state("down", urls[which])
            servers[which] = serve(ports[which])
            router.wait_up(urls[which])
        over.set()
        for client in clients:
            client.join()
        print(f"{n_kills} kills: {dict(seen)}")
        until(lambda: all(router.state(url)["running"] == 0 for url in urls), "requests that do not end")
        self.assertEqual(router.stop(), 0)
        for server in servers:
            server.kill()
            server.wait()
        self.assertEqual(set(seen) - {"whole", "ended", "broken"}, set())
        self.assertTrue(seen["whole"] > 0 and seen["ended"] > 0 and seen["broken"] > 0, seen)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
