"""tandem pull against a hub on loopback that is slow, cuts connections, lies about sizes and refuses.

    python3 tests/pull_test.py PATH_OF_TANDEM
"""
import collections
import hashlib
import http.server
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.parse

TANDEM = str(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/tandem").resolve())
ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "models" / "tiny-r1"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 300 << 20  # more than one range of 256 MiB


def git_blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def with_large_file(files):
    """Adds a sparse-looking but not constant file of LARGE bytes."""
    block = random.Random(1).randbytes(1 << 20)
    files["model-00002-of-00002.safetensors"] = b"".join(block[i:] + block[:i] for i in range(LARGE >> 20))
    return files


class Hub(http.server.ThreadingHTTPServer):
    """A repository made-up/tiny. What goes wrong is set as attributes."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(files)
        self.listing = [self.entry(path, data) for path, data in files.items()]
        self.commit = COMMIT
        self.token = ""                 # that clients must send
        self.cut = {}                   # path: bytes after which each connection is cut
        self.seconds_per_block = 0      # of 64 KiB
        self.statuses = []              # of the next answers to requests of files
        self.listing_statuses = []
        self.retry_after = None
        self.stalled = set()            # paths that stall once, half-way
        self.ignores_ranges = False
        self.wrong_range = False        # answers another range than was asked for
        self.unknown_length = False     # answers without Content-Length, as chunks
        self.redirects_to = None        # another Hub that has the bytes
        self.sent = collections.Counter()      # bytes by path
        self.requests = []              # (path, Range)
        self.tokens = []                # of requests of files
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @staticmethod
    def entry(path, data):
        blob = {"rfilename": path, "size": len(data), "blobId": git_blob(data)}
        if path.endswith(".safetensors"):
            blob["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return blob

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        pass  # clients that go away


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def refuse(self, status, text="no"):
        self.send_response(status)
        if self.server.retry_after is not None:
            self.send_header("Retry-After", str(self.server.retry_after))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        hub = self.server
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.refuse(401, '{"error": "Access is restricted"}')
        path, _, query = self.path.partition("?")
        if path == "/api/models/made-up/tiny/revision/main" and query == "blobs=true":
            if hub.listing_statuses:
                return self.refuse(hub.listing_statuses.pop(0))
            answer = hub.listing if isinstance(hub.listing, str) else json.dumps(
                {"id": "made-up/tiny", "sha": hub.commit, "siblings": hub.listing})
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            return self.wfile.write(answer.encode())
        match = re.fullmatch(r"/made-up/tiny/resolve/([0-9a-f]{40})/(.*)", path)
        name = urllib.parse.unquote(match[2]) if match else None
        if name not in hub.files:
            return self.refuse(404)
        hub.requests.append((name, self.headers.get("Range")))
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.statuses:
            return self.refuse(hub.statuses.pop(0))
        if hub.redirects_to:
            self.send_response(302)
            self.send_header("Location", hub.redirects_to.url + self.path)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        return self.send_file(hub, name)

    def send_file(self, hub, name):
        data = hub.files[name]
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked and not hub.ignores_ranges else (0, len(data))
        if begin >= len(data) and len(data) > 0:
            return self.refuse(416)
        end = min(end, len(data))
        if asked and hub.wrong_range:
            begin = max(0, begin - 1)
        self.send_response(206 if asked and not hub.ignores_ranges else 200)
        if asked and not hub.ignores_ranges:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if hub.unknown_length:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        cut = hub.cut.get(name)
        for at in range(begin, end, 1 << 16):
            piece = data[at:min(at + (1 << 16), end)]
            if cut is not None and at + len(piece) - begin > cut:
                self.wfile.write(piece[:max(0, cut - (at - begin))])
                self.wfile.flush()
                return self.connection.shutdown(2)
            if name in hub.stalled and at - begin >= (end - begin) // 2:
                hub.stalled.discard(name)
                time.sleep(20)
                return self.connection.shutdown(2)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if hub.unknown_length else piece)
            hub.sent[name] += len(piece)
            if hub.seconds_per_block:
                time.sleep(hub.seconds_per_block)
        if hub.unknown_length:
            self.wfile.write(b"0\r\n\r\n")
        return None


class Pulls(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="tandem-pull-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.into = self.folder / "model"
        self.files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}

    def hub(self, files=None):
        hub = Hub(self.files if files is None else files)
        self.addCleanup(hub.server_close)
        self.addCleanup(hub.shutdown)
        return hub

    def command(self, hub, *more):
        tries = [] if "--tries" in more else ["--tries", "3"]
        return [TANDEM, "pull", "made-up/tiny", "--dir", str(self.into), "--idle", "1", *tries, *more]

    def environment(self, hub, **more):
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and not k.startswith("HF_")}
        return {**kept, "HF_ENDPOINT": hub.url, **more}

    def pull(self, hub, *more, **env):
        return subprocess.run(self.command(hub, *more), capture_output=True, text=True, check=False, timeout=120,
                              env=self.environment(hub, **env))

    def ok(self, hub, *more, **env):
        result = self.pull(hub, "--json", *more, **env)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return json.loads(result.stdout)

    def refused(self, hub, *words, status=2, more=(), **env):
        result = self.pull(hub, *more, **env)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertTrue(result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertFalse((self.into / "config.json").exists())

    def whole(self, files=None):
        there = {str(path.relative_to(self.into)): path.read_bytes() for path in self.into.rglob("*")
                 if path.is_file() and ".pull" not in path.parts}
        files = self.files if files is None else files
        self.assertEqual(sorted(there), sorted(files))
        for name, data in files.items():
            self.assertTrue(there[name] == data, name)

    def test_a_checkpoint_that_runs(self):
        hub = self.hub()
        report = self.ok(hub)
        self.whole()
        self.assertEqual({k: report[k] for k in ("repository", "revision", "commit", "directory")},
                         {"repository": "made-up/tiny", "revision": "main", "commit": COMMIT, "directory": str(self.into)})
        n_bytes = sum(len(data) for data in self.files.values())
        self.assertEqual([report[k] for k in ("files", "bytes", "fetched_files", "fetched_bytes", "unchecked_files")],
                         [len(self.files), n_bytes, len(self.files), n_bytes, 0])
        run = subprocess.run([TANDEM, "run", str(self.into), "--temp", "0", "-q", "-p", "What is 478 + 356?"], capture_output=True,
                             text=True, check=True)
        self.assertIn("834", run.stdout)

    def test_again_fetches_nothing(self):
        hub = self.hub()
        self.ok(hub)
        hub.sent.clear()
        report = self.ok(hub)
        self.assertEqual((report["fetched_files"], report["fetched_bytes"], hub.sent.total()), (0, 0, 0))

    def test_files_from_elsewhere_are_read_and_kept(self):
        shutil.copytree(TINY, self.into)
        (self.into / "tokenizer.json").write_bytes(self.files["tokenizer.json"][:-1] + b" ")  # the right size
        hub = self.hub()
        report = self.ok(hub)
        self.assertEqual(list(hub.sent), ["tokenizer.json"])
        self.assertEqual(report["fetched_files"], 1)
        self.whole()

    def test_a_file_changed_later_is_noticed(self):
        hub = self.hub()
        self.ok(hub)
        changed = self.into / "tokenizer.json"
        changed.write_bytes(b"x" * len(self.files["tokenizer.json"]))
        self.assertEqual(self.ok(hub)["fetched_files"], 1)
        self.whole()

    def test_output_for_people(self):
        hub = self.hub({"config.json": b"{}", "model.safetensors": b"x" * 1234567})
        result = self.pull(hub, "--connections", "1")
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(lines[0], "made-up/tiny at 0123456789ab: 2 files, 1.2 MB; to fetch: 2 files, 1.2 MB")
        self.assertEqual(lines[1:3], ["config.json  0.0 MB  whole, git blob checked",
                                      "model.safetensors  1.2 MB  whole, SHA-256 checked"])
        self.assertRegex(lines[3], r"^\S+/model: 2 files, 1\.2 MB, all whole; fetched 1\.2 MB in [\d.]+ s \([\d.]+ MB/s\)$")
        self.assertEqual(len(lines), 4)
        self.assertEqual(self.pull(hub, "--quiet").stdout, "")

    def test_include(self):
        hub = self.hub({**self.files, "figures/benchmark.jpg": b"a", "sub folder/b c.json": b"{}", "model.py": b"p"})
        self.ok(hub)
        self.whole({**self.files, "sub folder/b c.json": b"{}"})
        self.ok(hub, "--include", "figures/*", "*.py")
        self.assertEqual((self.into / "figures" / "benchmark.jpg").read_bytes(), b"a")
        self.assertTrue((self.into / "model.py").exists())
        result = self.pull(hub, "--include", "*.gguf")
        self.assertEqual((result.returncode, result.stderr), (2, "error: --include: no file of the repository matches *.gguf\n"))

    def test_connections_that_are_cut(self):
        hub = self.hub()
        hub.cut = {name: 100_000 for name in self.files}
        report = self.ok(hub)
        self.whole()
        self.assertGreaterEqual(report["fetched_bytes"], report["bytes"])
        self.assertLess(report["fetched_bytes"], 1.5 * report["bytes"])

    def test_a_large_file_in_several_ranges_goes_on_where_it_was_killed(self):
        files = with_large_file({"config.json": b"{}"})
        hub = self.hub(files)
        hub.seconds_per_block = 0.004
        process = subprocess.Popen(self.command(hub), env=self.environment(hub), stdout=subprocess.DEVNULL)
        name = "model-00002-of-00002.safetensors"
        while hub.sent[name] < 20 << 20:
            time.sleep(0.05)
        time.sleep(1.2)  # records are written once a second
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.assertEqual([path.name for path in self.into.iterdir()], [".pull"])  # nothing that looks whole
        hub.seconds_per_block = 0
        hub.requests.clear()
        report = self.ok(hub)
        self.whole(files)
        self.assertEqual(report["fetched_files"], 2)  # whole now; config.json waited for the weights
        self.assertLess(report["fetched_bytes"], LARGE - (15 << 20))
        begins = [int(re.match(r"bytes=(\d+)-", asked)[1]) for path, asked in hub.requests if path == name]
        self.assertEqual(len(begins), 2)
        self.assertTrue(0 < min(begins) < 256 << 20 < max(begins) < LARGE, begins)

    def test_what_an_earlier_call_left_broken_is_fetched_again(self):
        hub = self.hub({"model.safetensors": bytes(200_000), "config.json": b"{}"})
        hub.cut, hub.ignores_ranges = {"model.safetensors": 70_000}, True  # it never gets further
        self.refused(hub, "model.safetensors: ", status=1)
        part = self.into / ".pull" / "model.safetensors.part"
        record = part.with_suffix(".part.json")
        content = json.loads(record.read_text())
        part.write_bytes(b"\1" * 200_000)  # as after a power failure
        self.assertEqual(content["next"], [70_000])
        content["next"] = [150_000]
        record.write_text(json.dumps(content))
        hub.cut, hub.ignores_ranges = {}, False
        hub.sent.clear()
        self.ok(hub)
        self.whole(hub.files)
        self.assertEqual(hub.sent["model.safetensors"], 250_000)
        for text in ("", "{", "[]", '{"bytes": 200000}', json.dumps({**content, "next": [-5]}),
                     json.dumps({**content, "next": [1, 2]}), json.dumps({**content, "next": ["x"]}),
                     json.dumps({**content, "bytes": 1}), json.dumps({**content, "digest": ""})):
            shutil.rmtree(self.into)
            (self.into / ".pull").mkdir(parents=True)
            part.write_bytes(b"\1" * 200_000)
            record.write_text(text)
            (self.into / ".pull" / "checked.json").write_text(text)
            self.ok(hub)
            self.whole(hub.files)

    def test_a_stalled_connection_is_opened_again(self):
        hub = self.hub({"model.safetensors": bytes(400_000), "config.json": b"{}"})
        hub.stalled = {"model.safetensors"}
        begin = time.monotonic()
        self.ok(hub)
        self.assertLess(time.monotonic() - begin, 15)
        self.whole(hub.files)

    def test_servers_that_are_busy_or_broken_are_asked_again(self):
        hub = self.hub()
        hub.listing_statuses = [503, 429]
        hub.statuses = [500, 503]
        self.ok(hub, "--connections", "1", "--tries", "4")
        self.whole()

    def test_retry_after_is_obeyed(self):
        hub = self.hub({"config.json": b"{}"})
        hub.statuses, hub.retry_after = [429], 2
        begin = time.monotonic()
        self.ok(hub)
        self.assertGreaterEqual(time.monotonic() - begin, 1.9)

    def test_gives_up_and_keeps_what_came(self):
        hub = self.hub()
        hub.listing_statuses = [503] * 3
        self.refused(hub, "/api/models/made-up/tiny/revision/main?blobs=true: the answer is 503", status=1)
        hub.statuses = [500] * 100
        self.refused(hub, "the answer is 500", status=1)
        hub.statuses = []
        hub.cut = {"model.safetensors": 0}
        self.refused(hub, "/resolve/" + COMMIT + "/model.safetensors: ", status=1)
        hub.cut = {}
        sent = dict(hub.sent)
        self.ok(hub)
        self.whole()
        self.assertEqual([name for name in self.files if hub.sent[name] != sent.get(name)], ["model.safetensors"])

    def test_no_hub_there(self):
        result = self.pull(self.hub(), HF_ENDPOINT="http://127.0.0.1:9")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r"^error: http://127\.0\.0\.1:9/api/models/\S+: .*connect.*\n$")

    def test_tokens_stay_with_the_hub(self):
        store = self.hub()
        hub = self.hub()
        hub.token, hub.redirects_to = "secret-1", store
        self.refused(hub, "the answer is 401", "Access is restricted", "HF_TOKEN")
        self.ok(hub, HF_TOKEN="secret-1")
        self.whole()
        self.assertEqual(set(hub.tokens), {"Bearer secret-1"})
        self.assertEqual(set(store.tokens), {None})

    def test_refusals_of_the_hub(self):
        hub = self.hub()
        hub.listing_statuses = [404]
        self.refused(hub, "the answer is 404", "no such repository, revision or file")
        self.assertEqual(list(self.folder.iterdir()), [])
        hub.listing_statuses = [403]
        self.refused(hub, "the answer is 403", "HF_TOKEN")
        hub.statuses = [404] * 100
        self.refused(hub, "/resolve/", "the answer is 404")

    def test_lies_about_sizes(self):
        for change, words in ((-1, "lists {} bytes and sends {}"), (1, "lists {} bytes and sends {}")):
            hub = self.hub({"model.safetensors": b"x" * 100_000, "config.json": b"{}"})
            hub.listing[0]["size"] += change
            self.refused(hub, words.format(100_000 + change, 100_000))
            shutil.rmtree(self.into)
        for change, words in ((-1, "sends more bytes than were asked for"), (1, "the answer is 416")):
            hub = self.hub({"model.safetensors": b"x" * 100_000, "config.json": b"{}"})
            hub.listing[0]["size"] += change
            hub.unknown_length = True
            self.refused(hub, words)
            shutil.rmtree(self.into)

    def test_lies_about_bytes(self):
        hub = self.hub({"model.safetensors": b"x" * 100_000, "config.json": b"{}"})
        right = hub.listing[0]["lfs"]["sha256"]
        hub.listing[0]["lfs"]["sha256"] = "0" * 64
        self.refused(hub, f"model.safetensors: the SHA-256 of what the hub sends is not {'0' * 64}")
        self.assertEqual(hub.sent["model.safetensors"], 200_000)  # it was fetched twice
        hub.listing[0]["lfs"]["sha256"] = right
        self.ok(hub)
        self.whole(hub.files)
        hub = self.hub({"tokenizer.json": b"[]", "config.json": b"{}"})
        hub.listing[0]["blobId"] = "0" * 40
        shutil.rmtree(self.into)
        self.refused(hub, "tokenizer.json: the git blob of what the hub sends is not")

    def test_without_digests_sizes_are_checked(self):
        hub = self.hub({"model.safetensors": b"x" * 100_000, "config.json": b"{}"})
        for entry in hub.listing:
            entry.pop("lfs", None)
            entry.pop("blobId")
        self.assertEqual(self.ok(hub)["unchecked_files"], 2)
        self.whole(hub.files)

    def test_servers_without_ranges(self):
        hub = self.hub({"model.safetensors": bytes(range(256)) * 1000, "config.json": b"{}"})
        hub.cut = {"model.safetensors": 100_000}
        hub.ignores_ranges = True
        self.refused(hub, "model.safetensors: ", status=1)  # it never gets further
        hub.cut = {}
        self.ok(hub)
        self.whole(hub.files)

    def test_another_range_than_was_asked_for(self):
        hub = self.hub({"model.safetensors": bytes(200_000), "config.json": b"{}"})
        hub.cut, hub.wrong_range = {"model.safetensors": 100_000}, True
        self.refused(hub, "asked for the bytes from 100000 on, the answer has those from 99999 on")

    def test_names_that_leave_the_folder(self):
        for name in ("../model.safetensors", "/etc/x.json", "a/../../x.json", "a//x.json", "./x.json", "a\\x.json", "x\n.json", "",
                     ".pull/checked.json", "x/" * 600 + "x.json"):
            hub = self.hub({"config.json": b"{}"})
            hub.listing.append({"rfilename": name, "size": 1})
            self.refused(hub, "its name would leave the folder")
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_answers_that_are_no_listing(self):
        hub = self.hub()
        entry = dict(hub.listing[0])
        listing = {"sha": COMMIT, "siblings": [entry]}
        for answer, words in (("<html>", "broken JSON"), ("[]", "no object"), ("{}", "no commit"), ('{"sha": 7}', "no commit"),
                              (json.dumps({"sha": COMMIT}), "lists no files"),
                              (json.dumps({**listing, "siblings": {}}), "lists no files"),
                              (json.dumps({**listing, "siblings": [7]}), "no file of a repository"),
                              (json.dumps({**listing, "siblings": [entry, entry]}), "listed twice"),
                              (json.dumps({**listing, "siblings": [{**entry, "size": -1}]}), "has no size"),
                              (json.dumps({**listing, "siblings": [{**entry, "size": 1e300}]}), "has no size"),
                              (json.dumps({**listing, "siblings": [{**entry, "size": 2**64 - 1}]}), "has no size"),
                              (json.dumps({**listing, "siblings": [{**entry, "size": "1"}]}), "has no size")):
            hub.listing = answer
            self.refused(hub, words)

    def test_too_large_for_the_disk(self):
        hub = self.hub({"config.json": b"{}"})
        hub.listing.append({"rfilename": "model.safetensors", "size": 1 << 43})
        self.refused(hub, "8796.09 GB are still to be fetched", "--dir")

    def test_a_new_commit_replaces_the_old_one_at_once(self):
        old = {"config.json": b'{"old": 1}', "model.safetensors": b"old" * 10_000}
        new = {"config.json": b'{"new": 1}', "model.safetensors": b"new" * 10_000}
        self.ok(self.hub(old))
        hub = self.hub(new)
        hub.commit, hub.statuses = "f" * 40, [200 + 304] * 100
        self.assertEqual(self.pull(hub).returncode, 1)
        self.whole(old)
        hub.statuses = []
        self.assertEqual(self.ok(hub)["commit"], "f" * 40)
        self.whole(new)

    def test_two_at_once_in_one_folder(self):
        hub = self.hub({"model.safetensors": bytes(4 << 20), "config.json": b"{}"})
        hub.seconds_per_block = 0.1
        first = subprocess.Popen(self.command(hub), env=self.environment(hub), stdout=subprocess.DEVNULL)
        while not hub.sent:
            time.sleep(0.02)
        self.refused(hub, "another process is fetching into this folder")
        hub.seconds_per_block = 0
        self.assertEqual(first.wait(60), 0)
        self.whole(hub.files)

    def test_an_empty_file_and_one_connection(self):
        hub = self.hub({**self.files, "empty.json": b""})
        self.ok(hub, "--connections", "1")
        self.whole(hub.files)

    def test_wrong_calls(self):
        for arguments, words in (
                (["tiny"], '"tiny" is no name of a repository: give OWNER/NAME'), (["a/b/c"], "is no name"), (["/b"], "is no name"),
                (["a/"], "is no name"), (["../b"], "is no name"), (["a/.."], "is no name"), (["a/b c"], "is no name"),
                (["a/b", "--connections", "0"], "--connections 0: must be 1 to 64"),
                (["a/b", "--connections", "65"], "--connections 65: must be 1 to 64"),
                (["a/b", "--tries", "0"], "--tries 0: must be 1 to 1000"), (["a/b", "--tries", "1001"], "must be 1 to 1000"),
                (["a/b", "--idle", "0.5"], "--idle 0.5: must be 1 to 3600"), (["a/b", "--idle", "3601"], "must be 1 to 3600"),
                (["a/b", "--revision", ""], "--revision: name a branch"),
                ([], "REPOSITORY")):
            result = subprocess.run([TANDEM, "pull", *arguments], capture_output=True, text=True, check=False, cwd=self.folder,
                                    env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"})
            self.assertEqual(result.returncode, 2, arguments)
            self.assertIn(words, result.stderr)
        result = subprocess.run([TANDEM, "pull", "a/b"], capture_output=True, text=True, check=False, cwd=self.folder,
                                env={**os.environ, "HF_ENDPOINT": "ftp://x"})
        self.assertEqual(result.stderr, "error: HF_ENDPOINT is ftp://x: it must begin with https:// or http://\n")
        self.into = pathlib.Path("/proc/nothing")
        self.refused(self.hub(), "/proc/nothing cannot be made")
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
