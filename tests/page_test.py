"""The chat page in a headless Chromium, driven by the DevTools protocol: a question to the embedded model, and answers made up
here: markup a model may write, errors, a stream that is stopped. Skipped (exit status 77) where there is no Chromium; then
only the page's text is checked.

    python3 tests/page_test.py PATH_OF_TANDEM [--screenshots FOLDER]
"""
import base64
import hashlib
import http.server
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from running_server import ROOT, Server

SCREENSHOTS = pathlib.Path(sys.argv[3]) if "--screenshots" in sys.argv else None
PAGE = (ROOT / "src" / "server" / "page" / "index.html").read_text(encoding="utf-8")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless Chromium; a WebSocket by hand, as the standard library has none."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
             "--remote-debugging-port=0", "--user-data-dir=" + self.folder.name, "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
        address = next(found for line in self.process.stderr if (found := re.search(r"ws://[^/]+:(\d+)(/\S+)", line)))
        threading.Thread(target=self.process.stderr.read, daemon=True).start()
        self.socket = socket.create_connection(("127.0.0.1", int(address[1])), timeout=60)
        self.socket.sendall(f"GET {address[2]} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.socket.makefile("rb")
        while self.file.readline().strip():
            pass
        self.ids = itertools.count(1)
        self.session = None
        self.problems = []  # of the page: exceptions, refusals of the content security policy
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")

    def send(self, text):
        data = text.encode()
        size = bytes([128 | len(data)]) if len(data) < 126 else bytes([254]) + struct.pack(">H", len(data))
        self.socket.sendall(b"\x81" + size + b"\0\0\0\0" + data)

    def receive(self):
        text = b""
        while True:
            first, size = self.file.read(2)
            size = {126: lambda: struct.unpack(">H", self.file.read(2))[0],
                    127: lambda: struct.unpack(">Q", self.file.read(8))[0]}.get(size, lambda: size)()
            text += self.file.read(size)
            if first & 128:
                return json.loads(text)

    def call(self, method, **parameters):
        number = next(self.ids)
        message = {"id": number, "method": method, "params": parameters}
        self.send(json.dumps({**message, "sessionId": self.session} if self.session else message))
        while True:
            reply = self.receive()
            if reply.get("method") == "Runtime.exceptionThrown":
                self.problems.append(reply["params"]["exceptionDetails"])
            if reply.get("method") == "Log.entryAdded" and "Security" in reply["params"]["entry"]["text"]:
                self.problems.append(reply["params"]["entry"]["text"])
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]

    def run(self, code):
        result = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition, seconds=30):
        for _ in range(int(seconds / 0.05)):
            if self.run(condition):
                return
            time.sleep(0.05)
        raise AssertionError(f"never: {condition}; the page says {self.run('document.body.innerText')!r}")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState == 'complete' && document.getElementById('model').textContent != ''")

    def size(self, width, height, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def key(self, name, code, text="", shift=False):
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, name):
        if SCREENSHOTS:
            SCREENSHOTS.mkdir(parents=True, exist_ok=True)
            (SCREENSHOTS / name).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def ask(self, text):
        """As a person does: types, then Enter; until the answer has ended."""
        self.run("document.getElementById('question').focus()")
        self.call("Input.insertText", text=text)
        self.key("Enter", 13, "\r")

    def ended(self, seconds=60):
        self.wait("document.getElementById('stop').hidden", seconds)
        return self.run("document.querySelector('#messages > .assistant:last-child').innerText")

    def close(self):
        self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()


class MadeUp(http.server.BaseHTTPRequestHandler):
    """The page, and for a question an answer that was put down for it."""
    answers = {}
    asked = []
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/":
            self.reply(200, PAGE.encode(), "text/html; charset=utf-8")
        else:
            self.reply(200, b'{"data": [{"id": "made-up"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        MadeUp.asked.append((body, self.headers.get("Authorization")))
        answer = MadeUp.answers[body["messages"][-1]["content"]]
        if isinstance(answer, tuple):
            return self.reply(answer[0], json.dumps({"error": {"message": answer[1]}}).encode())
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for part in answer:
                self.wfile.write(b"data: " + json.dumps(part).encode() + b"\n\n")
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except BrokenPipeError:
            pass
        self.close_connection = True

    def reply(self, status, body, content_type="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def said(text, size=7):
    return [{"choices": [{"delta": {"content": text[i:i + size]}}]} for i in range(0, len(text), size)]


class Text(unittest.TestCase):
    def test_names_nothing_from_elsewhere(self):
        self.assertEqual(re.findall(r'(?:src|href|action)="(?!data:,")[^"]*"', PAGE), [])
        self.assertNotRegex(PAGE, r"@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(|\son\w+=")

    def test_policy_allows_exactly_its_own_style_and_script(self):
        for tag in ("style", "script"):
            inside = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.S)
            self.assertEqual(len(inside), 1)
            wanted = "sha256-" + base64.b64encode(hashlib.sha256(inside[0].encode()).digest()).decode()
            self.assertIn(f"{tag}-src '{wanted}'", PAGE, "put this hash into the page")
        self.assertIn("default-src 'none'; connect-src 'self'", PAGE)


@unittest.skipUnless(CHROMIUM, "no chromium here")
class WithModel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Server("--served-model-name", "tiny-r1")
        cls.url = f"http://127.0.0.1:{cls.server.port}"
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        assert cls.server.stop() == 0

    def test_a_question_and_a_second_one(self):
        browser = self.browser
        browser.size(1000, 700)
        browser.open(self.url)
        browser.wait("document.getElementById('model').textContent == 'tiny-r1'")
        browser.run("document.getElementById('temperature').value = 0; 0")
        browser.ask("What is 478 + 356?")
        text = browser.ended()
        self.assertIn("The answer is 834.", text)
        self.assertRegex(text, r"Thought for [\d.]+ s")
        self.assertNotIn("ones 8+6+0=14", text, "thinking is folded")
        self.assertIn("ones 8+6+0=14", browser.run("document.querySelector('.thinking > div').textContent"))
        self.assertRegex(text, r"\d+ tokens · [\d.]+ tokens/s · first after \d+ ms")
        browser.ask("What is 12 + 7?")
        self.assertIn("The answer is 19.", browser.ended())
        self.assertEqual(browser.run("document.querySelectorAll('#messages > li').length"), 4)
        self.assertEqual(browser.problems, [])
        browser.screenshot("page_wide.png")
        browser.size(390, 700, dark=True)
        browser.run("document.querySelector('.thinking').open = true; document.getElementById('scroller').scrollTop = 0")
        self.assertLessEqual(browser.run("document.documentElement.scrollWidth"), 390)
        browser.screenshot("page_phone.png")


@unittest.skipUnless(CHROMIUM, "no chromium here")
class WithMadeUpAnswers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), MadeUp)
        threading.Thread(target=cls.server.serve_forever, daemon=True).start()
        cls.browser = Browser()

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.server.shutdown()

    def setUp(self):
        MadeUp.asked.clear()
        self.browser.size(1000, 700)
        self.browser.problems.clear()
        self.browser.open(f"http://127.0.0.1:{self.server.server_port}/")

    def answer(self, question, answer):
        MadeUp.answers[question] = answer
        self.browser.ask(question)
        return self.browser.ended()

    def count(self, selector):
        return self.browser.run(f"document.querySelectorAll('.assistant .text {selector}').length")

    def test_nothing_a_model_writes_becomes_markup(self):
        attack = ("<script>window.bad = 1</script><img src=x onerror='window.bad = 2'> [a](javascript:window.bad=3) [b](data:text/html,x) "
                  "[c](JaVaScRiPt:window.bad=4) <a href='javascript:window.bad=5'>d</a>\n\n```<script>\n</code></pre><script>window.bad = 6</script>\n```\n"
                  "| <svg onload=window.bad=7> | b |\n|---|---|\n| <iframe srcdoc='x'> | c |\n\n- <style>*{display:none}</style>\n# <b>h</b>\n"
                  "[e](https://good.example/\"onmouseover=\"window.bad=8)")
        text = self.answer("attack", said(attack))
        self.assertIn("<script>window.bad = 1</script>", text)
        for selector in ("script", "img", "svg", "iframe", "style", "b", "[onerror]", "[onload]", "[onmouseover]", 'a:not([href^="https://good.example/"])'):
            self.assertEqual(self.count(selector), 0, selector)
        self.assertEqual(self.count("a"), 1)
        self.assertIsNone(self.browser.run("window.bad"))
        self.assertEqual(self.browser.problems, [])

    def test_the_policy_stops_what_would_get_through(self):
        self.browser.run("const s = document.createElement('script'); s.textContent = 'window.bad = 1'; document.body.append(s); 0")
        self.assertIsNone(self.browser.run("window.bad"))
        self.assertEqual(self.browser.run("fetch('http://127.0.0.1:1/').then(() => 'sent', (e) => e.message)"), "Failed to fetch")
        self.assertTrue(self.browser.problems)

    def test_markdown(self):
        self.answer("markdown", said("# Title\nSome **bold**, *slanted*, `co<de>`, ~~gone~~ and snake_case_name, 2 * 3 * 4.\n\n"
                                     "1. one\n   - inner\n2. two\n\n> quoted\n\n| a | b |\n|---|:-:|\n| 1 | 2 |\n\n---\n```python\nprint('<hi>')\n```\n"
                                     "See https://a.example/x, [b](https://b.example/y_(z))."))
        for selector, n in {"h3": 1, "strong": 1, "em": 1, "del": 1, "p code": 1, "ol > li": 2, "ol ul > li": 1, "blockquote": 1, "td": 2, "th": 2,
                            "hr": 1, "pre": 1, "a": 2}.items():
            self.assertEqual(self.count(selector), n, selector)
        self.assertEqual(self.browser.run("document.querySelector('.text pre').textContent"), "print('<hi>')")
        self.assertEqual(self.browser.run("document.querySelectorAll('.text a')[1].href"), "https://b.example/y_(z)")
        self.browser.run("document.querySelector('.text').scrollIntoView()")
        self.browser.run("document.querySelector('.code button').click()")
        self.browser.wait("/Copied|Not copied/.test(document.querySelector('.code button').textContent)")

    def test_what_is_sent(self):
        self.browser.run("for (const [name, value] of Object.entries({temperature: 0.5, top_p: 0.9, max_tokens: 7, seed: 3, system: 'Be brief.', "
                         "key: 'secret'})) { const e = document.getElementById(name); e.value = value; e.dispatchEvent(new Event('change')); }")
        self.answer("first", [{"choices": [{"delta": {"reasoning_content": "hm"}}]}, *said("yes")])
        self.answer("second", said("no"))
        body, key = MadeUp.asked[-1]
        self.assertEqual(body["messages"], [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "first"},
                                            {"role": "assistant", "content": "yes"}, {"role": "user", "content": "second"}])
        self.assertEqual({name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed", "stream")},
                         {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "stream": True})
        self.assertEqual(key, "Bearer secret")
        self.assertIsNone(self.browser.run("localStorage.getItem('tandem.key')"), "the key goes with the tab")
        self.browser.run("localStorage.clear(); sessionStorage.clear()")

    def test_errors_are_shown_and_the_question_comes_back(self):
        self.assertIn("400: the prompt is too long <b>", self.answer("long", (400, "the prompt is too long <b>")))
        self.assertEqual(self.browser.run("document.getElementById('question').value"), "long")
        self.assertEqual(self.browser.run("document.querySelector('[role=alert]').children.length"), 0)
        self.browser.run("document.getElementById('question').value = ''")
        self.assertIn("API key", self.answer("key", (401, "send the server's key: Authorization: Bearer API key")))
        self.browser.run("document.getElementById('question').value = ''")
        self.assertIn("broke", self.answer("half", [*said("half an"), {"error": {"message": "it broke"}}]))
        self.assertIn("half an", self.browser.run("document.querySelector('.assistant:last-child .text').textContent"))

    def test_stop_and_new_chat(self):
        def slowly():
            for i in itertools.count():
                time.sleep(0.02)
                yield {"choices": [{"delta": {"content": f"{i} "}}]}
        MadeUp.answers["endless"] = slowly()
        self.browser.ask("endless")
        self.browser.wait("document.querySelector('.assistant .text')?.textContent.includes('5')")
        self.browser.run("document.getElementById('stop').click()")
        self.assertIn("0 1 2", self.browser.ended())
        self.assertEqual(self.browser.run("document.getElementById('status').textContent"), "Stopped.")
        self.answer("on", said("yes"))
        self.assertEqual(len(MadeUp.asked[-1][0]["messages"]), 3, "what was said until the stop stays")
        MadeUp.answers["again"] = slowly()
        self.browser.ask("again")
        self.browser.wait("document.querySelectorAll('.assistant').length == 3")
        self.browser.run("document.getElementById('clear').click()")
        self.browser.wait("document.getElementById('stop').hidden")
        self.assertEqual(self.browser.run("document.querySelectorAll('#messages > li').length"), 0)
        self.answer("fresh", said("yes"))
        self.assertEqual(len(MadeUp.asked[-1][0]["messages"]), 1)

    def test_keyboard_and_names(self):
        browser = self.browser
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        names = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]}
        for wanted in (("button", "Send"), ("button", "New chat"), ("button", "Settings"), ("main", "Conversation")):
            self.assertIn(wanted, names)
        self.assertTrue(any(role == "textbox" and "Your message" in name for role, name in names), names)
        self.assertEqual([name for role, name in names if role in ("button", "textbox", "link") and not name], [])
        self.assertIn("status", {role for role, _ in names})
        order = []
        browser.run("document.getElementById('clear').focus()")
        for _ in range(5):
            order.append(browser.run("document.activeElement.id"))
            browser.key("Tab", 9)
        self.assertEqual(order, ["clear", "show-settings", "scroller", "question", "send"])
        browser.run("document.getElementById('question').focus()")
        browser.call("Input.insertText", text="two")
        browser.key("Enter", 13, "\r", shift=True)
        self.assertEqual(MadeUp.asked, [], "Shift and Enter do not send")
        browser.run("document.getElementById('question').value = ''; document.getElementById('show-settings').focus()")
        browser.key("Enter", 13, "\r")
        browser.wait("document.getElementById('settings').open")
        unnamed = browser.run("[...document.querySelectorAll('dialog input, dialog select, dialog textarea')].filter((e) => !e.labels.length).length")
        self.assertEqual(unnamed, 0)
        browser.key("Escape", 27)
        browser.wait("!document.getElementById('settings').open")

    def test_fits_a_phone(self):
        for width in (320, 390):
            self.browser.size(width, 600)
            self.answer("wide", said("```\n" + "x" * 300 + "\n```\n" + "y" * 300 + "\n\n| a | b |\n|---|---|\n| " + "z" * 99 + " | c |\n"))
            self.assertLessEqual(self.browser.run("document.documentElement.scrollWidth"), width)
            self.assertLessEqual(self.browser.run("document.getElementById('scroller').scrollWidth"), width)
            self.assertTrue(self.browser.run("document.getElementById('send').getBoundingClientRect().bottom <= innerHeight"))


if __name__ == "__main__":
    result = unittest.main(argv=sys.argv[:1], exit=False).result
    if not CHROMIUM:
        print("no chromium: the page was not opened")
    sys.exit(1 if not result.wasSuccessful() else 0 if CHROMIUM else 77)
