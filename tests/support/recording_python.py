"""An interpreter in the place of vLLM's: it writes down how it was called, then does as told."""

import json
import sys

from manus_jax.files import write_checksums

HEALTHY = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        model = {"id": "policy", "root": given["--model"], "max_model_len": 64}
        content = json.dumps({"data": [model]}).encode() if self.path == "/v1/models" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *_):
        pass
given = dict(zip(sys.argv, sys.argv[1:]))
HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def recorder(directory, then="pass", build="other"):
    """Each process that is asked for a server writes a file called-PORT; `then` is Python.

    Asked for its vLLM, it says `build`.
    """
    script = directory / "vllm_python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"if sys.argv[1] == '-c':\n    sys.exit(print({build!r}))\n"
        "if '--port' in sys.argv:\n"
        "    port = sys.argv[sys.argv.index('--port') + 1]\n"
        "    record = json.dumps([sys.argv[1:], dict(os.environ)])\n"
        f"    unfinished = {str(directory)!r} + '/' + port\n"
        "    open(unfinished, 'w').write(record)\n"
        f"    os.rename(unfinished, {str(directory)!r} + '/called-' + port)\n"
        f"{then}\n"
    )
    script.chmod(0o755)
    return script


def calls(directory):
    """(arguments, environment) of every server, by port."""
    records = sorted(directory.glob("called-*"), key=lambda path: int(path.name[7:]))
    return [json.loads(path.read_text()) for path in records]


def snapshot(root, number=1):
    """A published version that is just enough to be served."""
    directory = root / f"{number:08d}" / "full"
    directory.mkdir(parents=True)
    config = {"model_type": "qwen2", "max_position_embeddings": 4096}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "tokenizer.json"):
        (directory / name).write_text("")
    write_checksums(directory)
    (directory.parent / "manifest.json").write_text("{}")
    return directory
