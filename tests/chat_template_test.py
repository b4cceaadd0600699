"""Expected output of chat templates and template expressions, from Python's Jinja in the environment of Hugging
Face's apply_chat_template.

--check: exits with 1 if Jinja's output differs from the committed files, with 77 if Jinja is missing.
--write: writes tests/data/templates/expected.json and the outputs in expressions.json.
"""
import json
import pathlib
import sys

try:
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox
except ImportError:
    print("skipped: needs the Python package jinja2")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "templates"
SHARED_V3 = ROOT.parent / "shared" / "vectors" / "deepseek_v3_tokenizer" / "tokenizer_config.json"
# Properties of the templates, found by reading them. None of them names the role "developer".
READS_PARTS = {"kimi_k2.jinja"}
READS_OBJECTS = {"kimi_k2.jinja", "deepseek_v3_1.jinja", "deepseek_v2.jinja"}  # templates that read arguments as an object; V2 writes no calls
UNKNOWN_ROLES = {"function"}  # most templates drop these roles without an error; the server refuses them
IGNORED_ROLES = {"deepseek_v2.jinja": {"function", "tool"}, "kimi_k2.jinja": set()}
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"


def main():
    if sys.argv[1:] == ["--write"]:
        write(DATA / "expected.json", expected())
        write(DATA / "expressions.json", expressions())
        return 0
    if sys.argv[1:] != ["--check"]:
        print(__doc__)
        return 2
    differences = compare("expected.json", expected()) + compare("expressions.json", expressions())
    print("\n".join(differences) or "as committed")
    return 1 if differences else 0


def expected():
    """{template: {conversation: [with generation prompt, without]}}; None where Jinja fails."""
    conversations = read("conversations.json")
    return {
        name: {
            c["name"]: [render_chat(name, source, c, prompt) for prompt in (True, False)]
            for c in conversations
        }
        for name, source in templates().items()
    }


def templates():
    found = {path.name: path.read_text() for path in sorted(DATA.glob("*.jinja"))}
    tiny = json.loads((ROOT / "models" / "tiny-r1" / "tokenizer_config.json").read_text())
    found["models/tiny-r1"] = tiny["chat_template"]
    if SHARED_V3.exists():
        found["DeepSeek-V3 as published"] = json.loads(SHARED_V3.read_text())["chat_template"]
    return found


def render_chat(name, source, conversation, add_generation_prompt):
    messages = [as_read(name, message) for message in conversation["messages"]]
    if any(message["role"] in IGNORED_ROLES.get(name, UNKNOWN_ROLES) for message in messages):
        return None
    context = dict(
        messages=messages,
        tools=conversation.get("tools"),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        bos_token=BOS,
        eos_token=EOS,
        **conversation.get("extra", {}),
    )
    return render(source, context)


def as_read(name, message):
    """The message as a server passes it to a template that expects text: parts joined as in vLLM, arguments as JSON."""
    message = dict(message)
    if message["role"] == "developer":
        message["role"] = "system"
    if isinstance(message.get("content"), list) and name not in READS_PARTS:
        message["content"] = "\n".join(part["text"] for part in message["content"])
    if name not in READS_OBJECTS:
        message["tool_calls"] = [with_text(call) for call in message.get("tool_calls") or []] or message.get("tool_calls")
        if message["tool_calls"] is None:
            del message["tool_calls"]
    return message


def with_text(call):
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))}}


def expressions():
    """The expressions with their outputs; None where Jinja fails."""
    cases = read("expressions.json")
    outputs = [
        {"template": case["template"], "output": render(case["template"], cases["context"])}
        for case in cases["cases"]
    ]
    return {"context": cases["context"], "cases": outputs}


def render(source, context):
    try:
        return environment().from_string(source).render(**context)
    except Exception:  # any failure of a template; which one is Python's own affair
        return None


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = to_json
    env.globals["raise_exception"] = raise_exception
    return env


class Generation(jinja2.ext.Extension):
    """{% generation %}: its body, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def read(name):
    return json.loads((DATA / name).read_text())


def write(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n")


def compare(name, value):
    committed = read(name)
    if name == "expected.json":  # templates that exist on some machines only may be missing
        committed = {key: committed[key] for key in committed if key in value}
    if value == committed:
        return []
    return [f"{name} differs from what Jinja {jinja2.__version__} gives; see --write"]


if __name__ == "__main__":
    sys.exit(main())
