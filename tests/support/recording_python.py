"""An interpreter in the place of vLLM's: it writes down how it was called, then does as told."""

import json
import sys

HEALTHY = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
given = dict(zip(sys.argv, sys.argv[1:]))
HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""


def recorder(directory, then="pass"):
    """Each process that is asked for a server writes a file called-PORT; `then` is Python."""
    script = directory / "vllm_python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "if '--port' in sys.argv:\n"
        "    port = sys.argv[sys.argv.index('--port') + 1]\n"
        "    record = json.dumps([sys.argv[1:], dict(os.environ)])\n"
        f"    open({str(directory)!r} + '/called-' + port, 'w').write(record)\n"
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
    (directory / "config.json").write_text("{}")
    (directory.parent / "manifest.json").write_text("{}")
    return directory
