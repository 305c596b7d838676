"""One vLLM server over HTTP: tokens in and out, and new weights while it runs.

Speaks vLLM's token-in-token-out route and its routes for reinforcement learning. Whatever goes
wrong is told apart by who is to blame: a request that this or any other server would refuse, or the
server, in which case another one can serve the request.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from manus_jax.engines.protocol import EngineError, FinishReason, Generation, Request
from manus_jax.vllm.access import KEY_VARIABLE
from manus_jax.weights.manifest import Identity

# vLLM puts this before the id that a request was given.
_ID_PREFIX = "generate-tokens-"
_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_HOW_TO_GIVE_A_KEY = f"give the key that it was started with in {KEY_VARIABLE}"
_HOW_TO_START = "start it with `python -m manus_jax.serve`"


class ServerFailure(EngineError):
    """The server cannot serve, or not now; another may."""


class ServerMisfit(ServerFailure):
    """The server answers, but not as it must; waiting does not help, starting it right does."""


class RequestRefused(EngineError):
    """The request is at fault; no server will take it."""


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """What a server says of itself. `max_requests` is what it works on at once."""

    model: str
    max_length: int
    max_requests: int
    takes_weights: bool


@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """Prompt tokens that the server looked for in its cache since it started, and found there."""

    queries: int = 0
    hits: int = 0


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """Seconds: `quick` for a sign of life, `generate` for one turn, `fetch` for new weights to be
    read and checked, `update` for each step of loading them."""

    quick: float = 10.0
    generate: float = 600.0
    fetch: float = 1800.0
    update: float = 600.0


def label_of(identity: Identity) -> str:
    """The name under which a server knows a version."""
    return f"{identity.number}-{identity.id}"


def number_of(label: str) -> int | None:
    """The version's number; None for weights that did not come from here."""
    number, dash, _ = label.partition("-")
    return int(number) if dash and number.isdigit() else None


class VllmServer:
    """Thread-safe; any number of generations at once."""

    def __init__(
        self, url: str, timeouts: Timeouts | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._timeouts = timeouts or Timeouts()
        self._model = ""
        self._http = requests.Session()
        self._http.trust_env = False  # a server of the pool is never behind a proxy
        adapter = HTTPAdapter(pool_connections=1, pool_maxsize=512)
        self._http.mount("http://", adapter)
        self._http.mount("https://", adapter)
        if api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {api_key}"

    def info(self) -> ServerInfo:
        """Raises ServerFailure for one that is not there, or whose numbers would be wrong."""
        quick = self._timeouts.quick
        models = self._call("GET", "/v1/models", quick)["data"]
        self._model = models[0]["id"]
        # It tells of the whole machine too, which it examines when it is asked for the first time.
        slow = self._timeouts.update
        config = self._call("GET", "/server_info?config_format=json", slow)["vllm_config"]
        mode = _find(config, "logprobs_mode")
        if mode != "processed_logprobs":
            raise ServerMisfit(
                f"{self.url} reports {mode}, which are not those of the distribution it samples "
                f"from; give it --logprobs-mode processed_logprobs, or {_HOW_TO_START}"
            )
        transfer = _find(config, "weight_transfer_config") or {}
        return ServerInfo(
            self._model,
            int(models[0]["max_model_len"]),
            int(_find(config, "max_num_seqs") or 1),
            transfer.get("backend") == "manus_jax",
        )

    def check_health(self) -> None:
        self._call("GET", "/health", self._timeouts.quick)

    def weight_label(self) -> str:
        """The engine itself answers this, between two of its steps, so it may take a while."""
        return str(self._call("GET", "/weight_info", self._timeouts.generate)["weight_version"])

    def served_config(self) -> dict[str, Any]:
        """The `config.json` of what it serves, as transformers completes it; needs our plug-in."""
        return dict(self._rpc("served_config", {})["results"][0])

    def prefix_cache(self) -> PrefixCache:
        return _prefix_cache(self._get_text("/metrics"))

    def generate(self, request: Request, request_id: str, other_weights: int | None) -> Generation:
        """`other_weights` is the number for weights that were not pushed; None: a failure."""
        how = request.sampling
        sampling = {
            "max_tokens": how.max_tokens,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "min_p": how.min_p,
            "seed": request.seed,
            "logprobs": 0,
            "stop_token_ids": list(how.stop_ids),
            "ignore_eos": True,  # it stops where the request says, as every engine does
        }
        if how.stop_strings:
            sampling["stop"] = list(how.stop_strings)
        body = {
            "request_id": request_id,
            "model": self._model,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling,
        }
        answer = self._call("POST", "/inference/v1/generate", self._timeouts.generate, body)
        try:
            return self._generation(answer["choices"][0], other_weights)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerFailure(f"{self.url} gave an answer without {error!r}") from None

    def _generation(self, choice: dict[str, Any], other_weights: int | None) -> Generation:
        reason = _FINISHED.get(choice["finish_reason"])
        if reason is None:
            raise ServerFailure(f"{self.url} ended a generation with {choice['finish_reason']!r}")
        ids = [int(i) for i in choice["token_ids"]]
        log_probs = [float(entry["logprob"]) for entry in choice["logprobs"]["content"]]
        versions: list[int] = []
        for span in choice["weight_versions"]:
            number = number_of(span["version"])
            if number is None:
                number = other_weights
            if number is None:
                raise ServerFailure(
                    f"{self.url} sampled from weights {span['version']!r}: it was started again"
                )
            versions += [number] * (int(span["end"]) - int(span["start"]))
        if not len(ids) == len(log_probs) == len(versions):
            raise ServerFailure(
                f"{self.url} gave {len(ids)} tokens, {len(log_probs)} log-probs and the weights "
                f"of {len(versions)}"
            )
        return Generation(tuple(ids), tuple(log_probs), tuple(versions), reason)

    def abort(self, request_ids: list[str]) -> None:
        """Ends generations; whoever waits for one gets a ServerFailure."""
        body = {"request_ids": [_ID_PREFIX + request_id for request_id in request_ids]}
        self._call("POST", "/inference/v1/abort_requests", self._timeouts.quick, body)

    def load(self, root: Path, identity: Identity) -> float:
        """Brings the server to a published version; the seconds for which it did not generate.

        All reading and checking comes first. Then generations in flight are frozen, the weights are
        swapped, what was cached of the old ones is dropped, and generations go on.
        """
        self._fetch(root, identity)
        began = time.monotonic()
        update = self._timeouts.update
        self._call("POST", "/pause?mode=keep", update)
        self._call("POST", "/start_weight_update", update)
        self._call("POST", "/update_weights", update, {"update_info": dataclasses.asdict(identity)})
        self._call("POST", "/finish_weight_update", update, {"weight_version": label_of(identity)})
        self._call("POST", "/reset_prefix_cache?reset_running_requests=true", update)
        self.resume()
        return time.monotonic() - began

    def resume(self) -> None:
        """Generations go on, if they were frozen."""
        self._call("POST", "/resume", self._timeouts.update)

    def _fetch(self, root: Path, identity: Identity) -> None:
        where = {"directory": str(root.absolute()), "number": identity.number}
        self._rpc("fetch_weights", where)
        deadline = time.monotonic() + self._timeouts.fetch
        while True:
            workers = self._rpc("fetched_weights", {})["results"]
            problems = [worker["error"] for worker in workers if worker["error"]]
            if problems:
                raise ServerFailure(
                    f"{self.url} cannot take version {identity.number}: {problems[0]}"
                )
            if not any(worker["busy"] for worker in workers):
                break
            if time.monotonic() > deadline:
                raise ServerFailure(
                    f"{self.url} did not read version {identity.number} in "
                    f"{self._timeouts.fetch:g} s"
                )
            time.sleep(0.05)
        if any(worker["held"] != dataclasses.asdict(identity) for worker in workers):
            raise ServerFailure(f"{self.url} read another version {identity.number} in {root}")

    def _rpc(self, method: str, arguments: dict[str, Any]) -> Any:
        body = {"method": method, "kwargs": arguments}
        return self._call("POST", "/collective_rpc", self._timeouts.update, body)

    def _get_text(self, path: str) -> str:
        return self._answer("GET", path, self._timeouts.quick).text

    def _call(self, method: str, path: str, timeout: float, body: Any = None) -> Any:
        answer = self._answer(method, path, timeout, body)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError:
            raise ServerFailure(f"{self.url}{path} did not answer with JSON") from None

    def _answer(
        self, method: str, path: str, timeout: float, body: Any = None
    ) -> requests.Response:
        try:
            answer = self._http.request(method, self.url + path, json=body, timeout=timeout)
        except requests.RequestException as error:
            raise ServerFailure(f"{self.url} does not answer ({type(error).__name__})") from None
        if answer.status_code >= 400:
            said = f"{self.url}{path} answered {answer.status_code}: {_message(answer)}"
            if path.startswith("/inference") and answer.status_code in (400, 413, 422):
                raise RequestRefused(said)
            if answer.status_code == 401:
                raise ServerMisfit(f"{said}; {_HOW_TO_GIVE_A_KEY}")
            if answer.status_code == 404:
                raise ServerMisfit(f"{said}; {_HOW_TO_START}")
            raise ServerFailure(said)
        return answer

    def close(self) -> None:
        self._http.close()


def _message(answer: requests.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return answer.text[:300]


def _prefix_cache(text: str) -> PrefixCache:
    """From Prometheus' text format, over all engines of the server."""
    counts = {"queries": 0.0, "hits": 0.0}
    for line in text.splitlines():
        name = line.partition("{")[0]
        for key in counts:
            if name == f"vllm:prefix_cache_{key}_total":
                counts[key] += float(line.rpartition(" ")[2])
    return PrefixCache(int(counts["queries"]), int(counts["hits"]))


def _find(config: Any, key: str) -> Any:
    """The value of a key, wherever in nested dictionaries it is."""
    if not isinstance(config, dict):
        return None
    if key in config:
        return config[key]
    found = (_find(value, key) for value in config.values())
    return next((value for value in found if value is not None), None)
