"""A server on the loopback that answers as vLLM 0.32 was seen to, and does what a test tells it.

Its tokens are made up: token i of a generation is `(seed + i) % 50 + version`. What it was asked is
kept in `calls`. It holds generations while `gate` is closed, so that tests can look at them in
flight, and it fetches versions with the real reader.
"""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from manus_jax.weights.manifest import WeightsError
from manus_jax.weights.mirror import Mirror


class LoopbackServer:
    def __init__(self, scratch, max_model_len=64, slots=4, logprobs_mode="processed_logprobs"):
        self.max_model_len, self.slots, self.logprobs_mode = max_model_len, slots, logprobs_mode
        self.backend, self.dtype = "manus_jax", "torch.float32"
        self.key = None  # that it asks for
        self.config = {}  # config.json of what it serves
        self.max_lora_rank, self.checksums = 0, {}  # of the tensors of what it serves
        self.returns_experts = False
        self.cache = (0, 0)  # prompt tokens that were looked for, and found
        self.engines = [(0, 0.0)]  # requests that wait and share of the KV cache, by engine
        self.calls, self.requests = [], []
        self.gate = threading.Event()
        self.gate.set()
        self.running = threading.Semaphore(0)  # released once for every generation that began
        self.failing = {}  # path → status to answer with
        self.instead = {}  # path → what to answer, or a function that writes to the connection
        self.distort = None  # a function that changes the choice of a generation
        self.model_path = "/models/policy"
        self.aborted = set()
        self.cut_off = False  # close connections instead of answering
        self.paused = False
        self._scratch = scratch
        self.restart()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def restart(self):
        """Forgets everything that it was given."""
        self.label, self.mirror, self.problem = "default", Mirror(self._scratch), None
        self.adapters = {}

    def close(self):
        self.gate.set()
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path, body):
        self.calls.append(path.partition("?")[0])
        if path in self.failing:
            return self.failing[path], {"error": {"message": "made to fail"}}
        if (instead := self.instead.get(path.partition("?")[0], self)) is not self:
            return 200, instead
        name = path.partition("?")[0].strip("/").replace("/", "_")
        return getattr(self, f"_{name}")(body)

    def _health(self, _):
        return 200, None

    def _v1_models(self, _):
        model = {"id": "policy", "root": self.model_path, "max_model_len": self.max_model_len}
        adapters = [{"id": k, "root": v, "parent": "policy"} for k, v in self.adapters.items()]
        return 200, {"data": [model, *adapters]}

    def _v1_load_lora_adapter(self, body):
        assert body["lora_name"] not in self.adapters
        self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, "Success"

    def _v1_unload_lora_adapter(self, body):
        del self.adapters[body["lora_name"]]
        return 200, "Success"

    def _server_info(self, _):
        config = {
            "model_config": {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode},
            "scheduler_config": {"max_num_seqs": self.slots},
            "weight_transfer_config": self.backend and {"backend": self.backend},
            "aux_output_config": {"enable_return_routed_experts": self.returns_experts},
            "lora_config": self.max_lora_rank and {"max_lora_rank": self.max_lora_rank},
        }
        return 200, {"vllm_config": config}

    def _weight_info(self, _):
        return 200, {"weight_version": self.label}

    def _metrics(self, _):
        lines = ["# TYPE vllm:prefix_cache_queries counter"]
        for name, count in zip(("queries", "hits"), self.cache, strict=True):
            lines.append(f'vllm:prefix_cache_{name}_total{{engine="0"}} {float(count)}')
            lines.append(f'vllm:prefix_cache_{name}_created{{engine="0"}} 1.7e+09')
        for engine, (waiting, usage) in enumerate(self.engines):
            lines.append(f'vllm:num_requests_waiting{{engine="{engine}"}} {float(waiting)}')
            lines.append(f'vllm:kv_cache_usage_perc{{engine="{engine}"}} {usage}')
        return 200, "\n".join(lines)

    def _collective_rpc(self, body):
        if body["method"] == "served_config":
            return 200, {"results": [self.config]}
        if body["method"] == "base_checksums":
            return 200, {"results": [self.checksums]}
        if body["method"] == "check_adapter":
            return 200, {"results": [None]}
        if body["method"] == "fetch_weights":
            self.problem = None
            try:
                self.mirror.advance(Path(body["kwargs"]["directory"]), body["kwargs"]["number"])
            except WeightsError as error:
                self.problem = str(error)
            return 200, {"results": [None]}
        held = self.mirror.held and {"number": self.mirror.held.number, "id": self.mirror.held.id}
        return 200, {"results": [{"busy": False, "error": self.problem, "held": held}]}

    def _pause(self, _):
        self.paused = True
        return 200, {"status": "paused"}

    def _start_weight_update(self, _):
        return 200, {"message": "Weight update started"}

    def _update_weights(self, body):
        assert self.paused
        assert self.mirror.held.id == body["update_info"]["id"]
        return 200, {"message": "Weights updated"}

    def _finish_weight_update(self, body):
        self.label = body["weight_version"]
        return 200, {"message": "Weight update finished"}

    def _reset_prefix_cache(self, _):
        return 200, {"success": True}

    def _resume(self, _):
        self.paused = False
        return 200, {"status": "resumed"}

    def _inference_v1_abort_requests(self, body):
        self.aborted |= set(body["request_ids"])
        self.gate.set()
        return 200, None

    def _inference_v1_generate(self, body):
        self.requests.append(body)
        if body["model"] not in ("", "policy", *self.adapters):
            return 404, {"error": {"message": f"The model {body['model']} does not exist"}}
        began = self.label
        self.running.release()
        self.gate.wait(30)
        if body["token_ids"][0] == 13:
            return 400, {"error": {"message": "Token id 13 is out of vocabulary", "code": 400}}
        if f"generate-tokens-{body['request_id']}" in self.aborted:
            return 200, {"choices": [_choice([], "abort", [])]}
        how = body["sampling_params"]
        version = 0 if began == "default" else int(began.split("-")[0])
        ids = [(how["seed"] + i) % 50 + version for i in range(how["max_tokens"])]
        spans = [{"version": began, "start": 0, "end": len(ids)}]
        if self.label != began:
            half = len(ids) // 2
            spans = [
                {"version": began, "start": 0, "end": half},
                {"version": self.label, "start": half, "end": len(ids)},
            ]
        choice = _choice(ids, "length", spans)
        if self.distort is not None:
            self.distort(choice)
        return 200, {"choices": [choice]}


def _choice(ids, reason, spans):
    content = [{"token_id": i, "logprob": -i / 100, "rank": 1} for i in ids]
    return {
        "index": 0,
        "finish_reason": reason,
        "stop_reason": None,
        "token_ids": ids,
        "weight_versions": spans,
        "logprobs": {"content": content},
    }


class _Handler(BaseHTTPRequestHandler):
    owner: LoopbackServer
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(None)

    def do_POST(self):
        length = int(self.headers.get("Content-Length") or 0)
        self._answer(json.loads(self.rfile.read(length) or "null"))

    def _answer(self, body):
        key = self.owner.key
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            status, content = 401, {"error": "this server needs its API key"}
        elif not self.owner.cut_off:
            status, content = self.owner.answer(self.path, body)
        if self.owner.cut_off:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if callable(content):
            self.close_connection = True
            with contextlib.suppress(OSError):
                content(self.connection)
            return
        text = content if isinstance(content, str) else json.dumps(content)
        data = b"" if content is None else text.encode()
        with contextlib.suppress(OSError):  # the client may be gone by now
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *_):
        pass
