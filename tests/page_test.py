"""The chat page in a headless Chromium, driven by the DevTools protocol: a question to the embedded model, and
prepared answers with markup, errors, or a stream that is stopped. Skipped (exit status 77) where there is no
Chromium; then only the page's text is checked.

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
FOLDER = ROOT / "src" / "server" / "page"
PAGE = re.sub(r'<script src="(\w+\.js)"></script>', lambda found: f"<script>\n{(FOLDER / found[1]).read_text(encoding='utf-8')}</script>",
              (FOLDER / "index.html").read_text(encoding="utf-8"))  # as CMake assembles it
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page of a headless Chromium. The WebSocket is implemented here, because the standard library has none."""

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
        self.problems = []  # exceptions, and violations of the content security policy
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
        """Types a question, presses Enter, and waits for the end of the answer."""
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
    """Serves the page, and a prepared answer to each question."""
    answers = {}
    asked = []
    experts = None  # what /experts answers: JSON, or a status and a message
    model = "made-up"
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/":
            self.reply(200, PAGE.encode(), "text/html; charset=utf-8")
        elif self.path == "/experts":
            status, body = MadeUp.experts
            self.reply(status, json.dumps(body).encode())
        else:
            self.reply(200, json.dumps({"data": [{"id": MadeUp.model}]}).encode())

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
            for part in answer:  # one event, or several in one piece
                events = part if isinstance(part, list) else [part]
                self.wfile.write(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
                self.wfile.flush()
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
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


def after(seconds, parts):
    for part in parts:
        time.sleep(seconds)
        yield part


RANDOM_FORMULAS = r"""(() => {
  let state = 7;  // mulberry32
  const below = (n) => {
    state = (state + 0x6D2B79F5) | 0;
    let word = Math.imul(state ^ (state >>> 15), 1 | state);
    word = (word + Math.imul(word ^ (word >>> 7), 61 | word)) ^ word;
    return ((word ^ (word >>> 14)) >>> 0) % n;
  };
  const one = (list) => list[below(list.length)];
  const commands = [kIdentifiers, kOperators, kLargeOperators, kIntegrals, kFunctions, kFunctionsWithLimits, kSpaces, kAccents, kWideAccents,
    kArrowsWithText, kSizes, kVariants, kVariantSwitches, kTextCommands, kIgnoredCommands, kTransparentCommands, kCommands, kCommands, kCommands]
    .flatMap((table) => [...table.keys()]).concat("constructor", "toString", "__proto__", "right", "end", "cr", "href", "nosuch").map((name) => "\\" + name);
  const signs = [..."{{}}^_&[]()$'|` 12xyα中😀\n\\~\"%#<>\0", "\\\\", "$$", "\\(", "\\)", "\\[", "\\]", "\n\n", "```\n", "2.5", "\ud800", "\uFFFF",
    "\u{F0041}", "\u{FFFFF}", "<script>", "<b>", "](javascript:x)", "**", "\n- ", "\n> ", "[4pt]"];
  const piece = () => [() => one(signs), () => one(signs), () => one(commands), () => one(commands) + one(["{", "{a}", "{a}{b}", "[2]{c}"]),
    () => one(["\\begin{", "\\end{"]) + one([...kEnvironments.keys(), "nosuch"]) + "}", () => "{" + piece() + "}"][below(6)]();
  const names = new Set("math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd mphantom".split(" "));
  const attributes = new Set(("display class stretchy lspace rspace fence form width linethickness displaystyle movablelimits largeop mathvariant accent " +
    "minsize maxsize symmetric mathsize").split(" "));
  const html = new Set("div p h3 h4 h5 h6 ol ul li blockquote pre code span strong em del hr table thead tbody tr th td a button".split(" "));
  const bad = [];
  let made = 0, refused = 0;
  for (let i = 0; i < 5000 && bad.length < 5; ++i) {
    let text = "";
    for (let n = 1 + below(i % 3 ? 8 : 40); n > 0; --n) text += piece();
    try {
      const node = formula(text, i % 2 === 0);
      node ? ++made : ++refused;
      if (shownFormulas(hideFormulas(text)) !== text.replace(/[\u{F0000}-\u{FFFFF}\uFFFF]/gu, "\uFFFD")) bad.push([text, "lost"]);
      const box = element("div", {}, ...markdown(hideFormulas(text)), ...withFormulas(hideFormulas(text)));
      if (/[\u{F0000}-\u{FFFFF}]/u.test(box.textContent)) bad.push([text, "private characters"]);
      if (node) box.append(node);
      for (const inside of box.querySelectorAll("*")) {
        const isMath = inside.namespaceURI === "http://www.w3.org/1998/Math/MathML";
        if (!(isMath ? names : html).has(inside.localName)) bad.push([text, inside.localName]);
        for (const {name} of inside.attributes) if (isMath && !attributes.has(name)) bad.push([text, name]);
      }
    } catch (error) {
      bad.push([text, String(error).slice(0, 200)]);
    }
  }
  return JSON.stringify({made, refused, bad});
})()"""


class Text(unittest.TestCase):
    def test_names_nothing_from_elsewhere(self):
        self.assertEqual(re.findall(r'(?:src|href|action)="(?!data:,")[^"]*"', PAGE), [])
        self.assertNotRegex(PAGE, r"@import|url\(|innerHTML|insertAdjacent|document\.write|eval\(|\son\w+=")

    def test_policy_allows_exactly_its_own_style_and_script(self):
        for tag, n in (("style", 1), ("script", 5)):
            inside = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.S)
            self.assertEqual(len(inside), n)
            wanted = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in inside]
            self.assertIn(f"{tag}-src {' '.join(wanted)};", PAGE, "put these hashes into the page")
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
        browser.size(390, 700, dark=True)
        browser.run("document.querySelector('.thinking').open = true")
        self.assertLessEqual(browser.run("document.documentElement.scrollWidth"), 390)

    def test_uses_of_experts(self):
        browser = self.browser
        browser.size(1000, 700)
        browser.open(self.url)
        self.server.ok("/v1/completions", {"prompt": "What is 12 + 7?", "max_tokens": 20})
        layers = self.server.get("/experts")[1]["layers"]
        browser.run("document.getElementById('show-experts').click()")
        browser.wait("!document.getElementById('experts-map').hidden")
        self.assertEqual(browser.run("[document.getElementById('experts-map').width, document.getElementById('experts-map').height]"),
                         [len(layers[0]["counts"]), len(layers)])
        self.assertIn(f"chosen {layers[0]['counts'][0]} times", browser.run("document.getElementById('experts-at').textContent"))
        browser.screenshot("experts.png")
        self.server.ok("/v1/completions", {"prompt": "What is 2 + 7?", "max_tokens": 20})  # the panel asks again
        steps = self.server.get("/experts")[1]["steps"]
        browser.wait(f"document.getElementById('experts-summary').textContent.startsWith('The last {steps} of')")
        self.assertEqual(browser.problems, [])
        browser.key("Escape", 27)
        browser.wait("!document.getElementById('experts').open")

    def test_the_program_has_this_page(self):
        self.assertTrue(self.server.get("/")[1] == PAGE, "build the program again")


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

    def test_formulas(self):
        self.browser.size(1000, 760)
        self.answer("Where is x² − 5x + 6 zero?", after(0.02, [
            *({"choices": [{"delta": {"reasoning_content": text}}]} for text in ("By the formula, ", r"\(x = \frac{5 \pm \sqrt{25 - 24}}{2}\).")),
            *said("The roots of \\(x^2 - 5x + 6\\) are\n\\[\nx_{1,2} = \\frac{-b \\pm \\sqrt{b^2 - 4ac}}{2a} = \\frac{5 \\pm 1}{2},\n\\]\n"
                  "so with\n\n$$\\begin{pmatrix} 3 & 0 \\\\ 0 & 2 \\end{pmatrix}, \\qquad f(x) = \\begin{cases} 1 & \\text{if } x > 0 \\\\ 0 & \\text{otherwise} "
                  "\\end{cases}, \\qquad \\sum_{k=0}^{\\infty} \\frac{1}{2^k} = 2$$\n\nthe answer is\n\n\\[\\boxed{x = 2 \\text{ or } x = 3}\\]\n\n"
                  "A book costs $5 and a pen \\$2, for any $n$ of them.")]))
        self.assertEqual(self.count("math"), 5)
        self.assertEqual(self.count("math[display=block] .boxed"), 1)
        border, width, height = self.browser.run("((e) => [getComputedStyle(e).borderTopWidth, e.getBoundingClientRect().width, "
                                                 "e.getBoundingClientRect().height])(document.querySelector('.text .boxed'))")
        self.assertEqual(border, "1px")
        self.assertTrue(80 < width < 300 and 18 < height < 60, (width, height))
        self.assertEqual(self.browser.run("document.querySelectorAll('.thinking math').length"), 1)
        text = self.browser.run("document.querySelector('.assistant .text').innerText")
        self.assertNotIn("\\", text)
        self.assertIn("costs $5 and a pen $2, for any", text)
        self.assertEqual(self.browser.problems, [])
        self.browser.run("document.getElementById('scroller').scrollTop = 0")
        self.browser.screenshot("page_wide.png")
        self.browser.size(390, 760, dark=True)
        self.browser.run("document.querySelector('.thinking').open = true")
        self.assertLessEqual(self.browser.run("document.getElementById('scroller').scrollWidth"), 390)
        self.browser.screenshot("page_phone.png")

    def test_where_formulas_stand(self):
        def shown(text):  # formulas are shown in brackets
            return self.browser.run(f"""(() => {{ const box = element("div", {{}}, ...markdown(hideFormulas({json.dumps(text)})));
                for (const math of box.querySelectorAll("math")) math.replaceWith("[" + math.textContent + "]");
                return box.textContent; }})()""")
        for text, wanted in (
                (r"\(a\) \[b\] $c$ $$d$$", "[a] [b] [c] [d]"), (r"$a$$b$", "$a$$b$"), (r"\(a\)\(b\)", "[a][b]"),
                ("$5 and $10, US$5/US$10, $5-$10", "$5 and $10, US$5/US$10, $5-$10"), ("5$ or 6$", "5$ or 6$"), ("from $5 to 10$.", "from $5 to 10$."),
                ("$HOME/$PATH, a $x $y", "$HOME/$PATH, a $x $y"), ("$5 and $x$", "$5 and [x]"), (r"\$5 and $x$", "$5 and [x]"), ("$5$", "[5]"),
                ("$a\nb$", "$a\nb$"), ("$ a$ $a $", "$ a$ $a $"),
                (r"`\(a\)` and ``$`b`$``", r"\(a\) and $`b`$"), ("```\n\\(a\\)\n```\n$b$", "textCopy\\(a\\)[b]"), ("~~~\n$a$", "textCopy$a$"),
                ("a ` b $c$\n\nd ` $e$", "a ` b [c]d ` [e]"),
                ("\\[\na\n- b\n# c\n\\]", "[a−b#c]"), ("\\[ a\n\nb \\]", "\\[ a\n\nb \\]".replace("\n\n", "")), (r"\[ a", r"\[ a"), (r"\( a $", r"\( a $"),
                (r"**\(a_1\) and** _\(b_2\)_", "[a1] and [b2]"), ("- \\(a\\)\n  - \\[b\\]\n1. $c$", "[a][b][c]"), ("> $a$", "[a]"),
                ("| $|a|$ | b |\n|---|---|\n| \\(c\\) | d |", "[|a|]b[c]d"), ("### On $a*b*c$", "On [a∗b∗c]"),
                ("\\begin{align*}\na &= b \\\\\n&= c\n\\end{align*}", "[a=b=c]"), ("\\begin{verse}a\\end{verse}", "\\begin{verse}a\\end{verse}"),
                (r"[\(a\)](https://a.example/)", r"\(a\)"), (r"\\(a\\)", r"\\(a\\)"), (r"\[ \frac{1} \]", r"\[ \frac{1} \]"), (r"\(\)", r"\(\)"),
                ("a\U000F0041\U000FFFFFb", "a\uFFFD\uFFFDb")):
            self.assertEqual(shown(text), wanted, text)

    def test_what_formulas_become(self):
        def mathml(text):
            made = self.browser.run(f"formula({json.dumps(text)}, false)?.innerHTML ?? null")
            return made and re.sub(r' (stretchy="false"|xmlns="[^"]*"|form="\w+"|fence="true"|displaystyle="true")', "", made)
        i, o, n = (lambda tag: lambda text: f"<{tag}>{text}</{tag}>")("mi"), lambda text: f"<mo>{text}</mo>", lambda text: f"<mn>{text}</mn>"
        high = lambda text: f'<mo stretchy="true">{text}</mo>'
        for text, wanted in (
                ("x^2", f"<msup>{i('x')}{n(2)}</msup>"), ("x_{i+1}^2", f"<msubsup>{i('x')}<mrow>{i('i')}{o('+')}{n(1)}</mrow>{n(2)}</msubsup>"),
                ("x^12", f"<mrow><msup>{i('x')}{n(1)}</msup>{n(2)}</mrow>"), (r"\frac12", f"<mfrac>{n(1)}{n(2)}</mfrac>"),
                (r"\frac{a}{b}", f"<mfrac>{i('a')}{i('b')}</mfrac>"), ("3.14", n("3.14")), ("1,2", f"<mrow>{n(1)}{o(',')}{n(2)}</mrow>"),
                (r"\sqrt[3]{8}", f"<mroot>{n(8)}{n(3)}</mroot>"), (r"\sqrt x", f"<msqrt>{i('x')}</msqrt>"),
                (r"\boxed{42}", f'<mrow class="boxed">{n(42)}</mrow>'), (r"\text{if $x$}", f"<mrow><mtext>if\u00a0</mtext>{i('x')}</mrow>".replace("\u00a0", "&nbsp;")),
                (r"a \le b", f"<mrow>{i('a')}{o('≤')}{i('b')}</mrow>"), (r"\alpha\times\infty", f"<mrow>{i('α')}{o('×')}<mi mathvariant=\"normal\">∞</mi></mrow>"),
                (r"\left( a \right]", f"<mrow>{high('(')}{i('a')}{high(']')}</mrow>"), (r"\left. a \right|", f"<mrow><mrow></mrow>{i('a')}{high('|')}</mrow>"),
                (r"\mathbb{R} \mathbf{x} \mathcal O \mathrm{sin}", f"<mrow>{i('ℝ')}{i('𝐱')}{i('𝒪')}<mi mathvariant=\"normal\">sin</mi></mrow>"),
                (r"\sum_{i}^n", f'<munderover><mo movablelimits="true" largeop="true">∑</mo>{i("i")}{i("n")}</munderover>'),
                (r"\int_0^1", f'<msubsup><mo largeop="true">∫</mo>{n(0)}{n(1)}</msubsup>'), ("f''", f"<msup>{i('f')}{o('′′')}</msup>"),
                (r"\hat x", f'<mover accent="true">{i("x")}{o("^")}</mover>'), (r"\not=", o("≠")), (r"50\%", f"<mrow>{n(50)}{o('%')}</mrow>"),
                (r"\nosuch{a}", f"<mrow><mtext>\\nosuch</mtext>{i('a')}</mrow>"), (r"\constructor\__proto__", None),
                (r"a & b \\ c", f'<mtable class="aligned"><mtr><mtd class="r">{i("a")}</mtd><mtd class="l">{i("b")}</mtd></mtr>'
                                f'<mtr><mtd class="r">{i("c")}</mtd></mtr></mtable>'),
                (r"\begin{bmatrix}1\\[4pt]2\\\end{bmatrix}", f'<mrow>{high("[")}<mtable class="matrix"><mtr><mtd class="c">{n(1)}</mtd></mtr>'
                                                            f'<mtr><mtd class="c">{n(2)}</mtd></mtr></mtable>{high("]")}</mrow>'),
                (r"\begin{array}{l|r}a&b\end{array}", f'<mtable class="matrix"><mtr><mtd class="l">{i("a")}</mtd><mtd class="r">{i("b")}</mtd></mtr></mtable>'),
                ("{", None), ("}", None), (r"\frac{1}", None), (r"\left(", None), (r"\begin{matrix}", None), (r"\begin{a}\end{a}", None),
                (r"\begin{matrix}\end{pmatrix}", None), ("a & b }", None), (r"\sqrt[", None), (r"\text{", None), (r"\right)", None), ("", None)):
            self.assertEqual(mathml(text), wanted, text)

    def test_formulas_hold_any_text(self):
        """Random strings cause no exception, use only elements and attributes of MathML Core, show no private
        characters and lose no text.
        """
        result = json.loads(self.browser.run(RANDOM_FORMULAS))
        self.assertEqual(result["bad"], [])
        self.assertGreater(result["made"], 500)
        self.assertGreater(result["refused"], 500)
        self.assertEqual(self.browser.problems, [])

    def test_formulas_take_linear_time(self):
        """A quadratic algorithm would take minutes for 100,000 characters."""
        for piece in ("{", "}", "\\sqrt", "\\hat{", "x^", "x_", "\\(", "\\[", "\\(a\\)", "$", "$a ", "$1 ab ", "$$a", "`", "` ``", "\n```", "\\begin{align}", "\\left(", "a&",
                      "\\\\", "'", "_{", "\n\n\\(", "\n\n`", "\\text{", "\\frac", "1", "1.", "a ", "\\mathrm{ab", "\\begin{pmatrix}1&2\\\\\\end{pmatrix}",
                      "\\\\[1", "\\not", "\\end{a", "\n ", "\\sqrt[", "\\unknown"):
            seconds = self.browser.run(f"""(() => {{ const text = {json.dumps(piece)}.repeat(1e5 / {len(piece)}), before = performance.now();
                formula(text, true); formula("{{" + text + "}}", true); shownFormulas(hideFormulas(text));
                return (performance.now() - before) / 1000; }})()""")
            self.assertLess(seconds, 5, piece)

    def test_what_is_too_deep_is_text(self):
        for deep in ("> " * 20000, "".join(" " * i + "- x\n" for i in range(300)), "\\(" + "{" * 20000 + "}" * 20000 + "\\)"):
            self.answer("deep", said(deep, 1000))
            self.assertEqual(self.browser.problems, [])
            self.assertTrue(self.browser.run("document.querySelector('.assistant:last-child .text').textContent.length > 0"))

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
        text = self.answer("long", (400, "the prompt is too long <b>"))
        self.assertIn("400: the prompt is too long <b>", text)
        self.assertNotIn("waiting", text)
        self.assertEqual(self.browser.run("document.querySelector('.assistant .figures').textContent"), "")
        self.assertEqual(self.browser.run("document.getElementById('question').value"), "long")
        self.assertEqual(self.browser.run("document.querySelector('[role=alert]').children.length"), 0)
        self.browser.run("document.getElementById('question').value = ''")
        self.assertIn("API key", self.answer("key", (401, "send the server's key: Authorization: Bearer API key")))
        self.browser.run("document.getElementById('question').value = ''")
        self.assertIn("broke", self.answer("half", [*said("half an"), {"error": {"message": "it broke"}}]))
        self.assertIn("half an", self.browser.run("document.querySelector('.assistant:last-child .text').textContent"))

    def test_figures(self):
        text = self.answer("one", said("yes"))
        self.assertRegex(text, r"\b1 token · first after \d+ ms")
        text = self.answer("burst", after(0.5, [said("x" * 5000, 1)]))
        self.assertRegex(text, r"5000 tokens · [\d.]+ tokens/s")
        self.assertLess(float(re.search(r"([\d.]+) tokens/s", text)[1]), 5000 / 0.5)
        text = self.answer("thought in a burst", after(0.3, [[{"choices": [{"delta": {"reasoning_content": "hm"}}]}, *said("yes")]]))
        self.assertGreaterEqual(float(re.search(r"Thought for ([\d.]+) s", text)[1]), 0.3)
        text = self.answer("two bursts", after(0.25, [said("x" * 3000, 1), said("x" * 3000, 1)]))
        self.assertLess(float(re.search(r"([\d.]+) tokens/s", text)[1]), 6000 / 0.25)
        text = self.answer("stream", after(0.05, said("x" * 40, 2)))
        rate = float(re.search(r"20 tokens · ([\d.]+) tokens/s", text)[1])
        self.assertTrue(5 < rate < 22, rate)

    def test_the_header_shows_the_whole_name(self):
        self.addCleanup(setattr, MadeUp, "model", MadeUp.model)
        for model, shown in (("/a/long/path/that/leads/to/the/models/of/this/machine/DeepSeek-R1-Distill-Qwen-32B/", "DeepSeek-R1-Distill-Qwen-32B"),
                             ("deepseek-ai/DeepSeek-R1", "DeepSeek-R1"), ("r1", "r1"), ("x" * 60, "x" * 60)):
            MadeUp.model = model
            self.browser.size(320, 600)
            self.browser.open(f"http://127.0.0.1:{self.server.server_port}/")
            self.assertEqual(self.browser.run("document.getElementById('model').textContent"), shown)
            self.assertEqual(self.browser.run("document.getElementById('model').title"), model)
            self.assertTrue(self.browser.run("((e) => e.scrollWidth <= e.clientWidth && e.getBoundingClientRect().right <= 320)"
                                             "(document.getElementById('model'))"), model)
            self.assertEqual(self.browser.run("[...document.querySelectorAll('header > *')].filter((e) => e.getBoundingClientRect().right > 320).length"), 0)

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
        for _ in range(6):
            order.append(browser.run("document.activeElement.id"))
            browser.key("Tab", 9)
        self.assertEqual(order, ["clear", "show-experts", "show-settings", "scroller", "question", "send"])
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

    def test_experts(self):
        browser = self.browser
        MadeUp.experts = 200, {"window_steps": 100, "steps": 40, "tokens": 900, "balancedness": 0.8, "load": [30, 10], "gpu_share": 0.25, "layers": [
            {"layer": 3, "balancedness": 0.5, "counts": [1, 4, 16, 0, 0, 3], "ranks": [[0], [1], [0, 1], [0], [1], [0]], "gpu": [2]},
            {"layer": 4, "balancedness": 1, "counts": [2, 2, 2, 2, 2, 2], "ranks": None}]}

        def at():
            return browser.run("document.getElementById('experts-at').textContent")

        def colour(row, column):
            return browser.run(f"[...document.getElementById('experts-map').getContext('2d').getImageData({column}, {row}, 1, 1).data]")[:3]

        browser.run("document.getElementById('show-experts').click()")
        browser.wait("document.getElementById('experts-summary').textContent != ''")
        self.assertEqual(browser.run("document.getElementById('experts-summary').textContent"),
                         "The last 40 of at most 100 steps, 900 tokens. Balancedness 0.800: rank 0 75.0 %, rank 1 25.0 % of the rows."
                         " 25.0 % of the rows have their expert on the GPU.")
        even, often, rare = [247, 247, 247], [178, 24, 43], [33, 102, 172]
        self.assertEqual([colour(0, i) for i in (1, 2, 0, 3)], [even, often, rare, rare], "the mean is 4")
        self.assertEqual([colour(1, i) for i in range(6)], [even] * 6)
        soft = colour(0, 5)
        self.assertTrue(all(r < s < e for r, s, e in zip(rare, soft, even)), soft)
        box = browser.run("(({left, top, width, height}) => [left, top, width, height])(document.getElementById('experts-map').getBoundingClientRect())")
        for row, column, text in ((0, 2, "Layer 3, expert 2: chosen 16 times, 4.00 × the layer's mean, on ranks 0, 1, on the GPU."),
                                  (0, 4, "Layer 3, expert 4: chosen 0 times, 0.00 × the layer's mean, on rank 1."),
                                  (0, 0, "Layer 3, expert 0: chosen 1 times, 0.25 × the layer's mean, on rank 0, on the CPU."),
                                  (1, 0, "Layer 4, expert 0: chosen 2 times, 1.00 × the layer's mean.")):
            browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + (column + .5) / 6 * box[2], y=box[1] + (row + .5) / 2 * box[3])
            browser.wait(f"document.getElementById('experts-at').textContent == {json.dumps(text)}")
        browser.run("document.getElementById('experts-map').focus()")
        for key, code in (("ArrowUp", 38), ("ArrowUp", 38), ("ArrowRight", 39)):  # there is no row above the first
            browser.key(key, code)
        self.assertIn("Layer 3, expert 1:", at())
        MadeUp.experts = 404, {"error": {"message": "not <b>counted</b>"}}
        browser.wait("document.getElementById('experts-summary').textContent == '404: not <b>counted</b>'")
        self.assertTrue(browser.run("document.getElementById('experts-map').hidden"))
        self.assertEqual(at(), "")
        browser.key("Escape", 27)
        browser.wait("!document.getElementById('experts').open")
        self.assertEqual(browser.problems, [])

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
