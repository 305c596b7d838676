"""One vLLM server over HTTP: tokens in and out, and new weights while it runs.

Uses vLLM's token-in-token-out route and its routes for reinforcement learning. Errors distinguish
an invalid request, which every server would refuse, from a failed server, in which case another
server can take the request.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError, FinishReason, Generation, Request
from manus_jax.models.architecture import Architecture, ModelError, from_hf_config
from manus_jax.vllm.access import KEY_VARIABLE
from manus_jax.vllm.http_connections import BreakableSession
from manus_jax.weights.manifest import Identity

# vLLM prepends this to the id of a request.
_ID_PREFIX = "generate-tokens-"
_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_HOW_TO_GIVE_A_KEY = f"give the key that it was started with in {KEY_VARIABLE}"
_HOW_TO_START = "start it with `python -m manus_jax.serve`"
_NOT_COMPARED = ("max_positions", "initializer_range")  # they do not affect the forward pass


class ServerFailure(EngineError):
    """The server cannot serve the request now; another one may."""


class IncompatibleServer(ServerFailure):
    """The server answers but cannot be used until it is started differently."""


class RequestRefused(EngineError):
    """The request is at fault; no server will accept it."""


@dataclasses.dataclass(frozen=True)
class PrefixCache:
    """Prompt tokens looked up in the server's cache since it started, and those found."""

    queries: int = 0
    hits: int = 0


def label_of(identity: Identity) -> str:
    """The name of a version on the servers."""
    return f"{identity.number}-{identity.id}"


def number_of(label: str) -> int | None:
    """The version's number; None for weights that were not published by this project."""
    number, dash, _ = label.partition("-")
    return int(number) if dash and number.isdigit() else None


class VllmServer:
    """Thread-safe; any number of generations at once.

    Args:
      url: the server's root.
      settings: its timeouts are used; None: the defaults.
      api_key: sent with every request.
    """

    def __init__(
        self, url: str, settings: VllmSettings | None = None, api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._settings = settings or VllmSettings(urls=(url,), push=False)
        self._model = ""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._control = BreakableSession(headers)
        self._generations = BreakableSession(headers)

    def examine(self, max_length: int, push: bool, model: Architecture | None) -> int:
        """How many requests the server runs at once; IncompatibleServer if it cannot be used.

        Args:
          max_length: the context that is needed.
          push: whether it must take weights.
          model: the architecture that it must serve; None: any.
        """
        models = self._call("GET", "/v1/models", self._settings.check_timeout)
        with self._parsing():
            served = models["data"][0]
            self._model, context = served["id"], int(served["max_model_len"])
        # The first call is slow: it also collects information about the machine.
        answer = self._call("GET", "/server_info?config_format=json", self._settings.update_timeout)
        with self._parsing():
            config = answer["vllm_config"]
        mode = _find(config, "logprobs_mode")
        if mode != "processed_logprobs":
            raise IncompatibleServer(
                f"{self.url} reports {mode}, which differ from the distribution it samples from; "
                f"give it --logprobs-mode processed_logprobs, or {_HOW_TO_START}"
            )
        if context < max_length:
            raise IncompatibleServer(
                f"{self.url} has a context of {context} tokens and {max_length} are needed: "
                f"start it with --max-model-len {max_length}"
            )
        transfer = _find(config, "weight_transfer_config") or {}
        takes_weights = transfer.get("backend") == "manus_jax"
        if push and not takes_weights:
            raise IncompatibleServer(
                f"{self.url} was started without this project's plug-in and takes no weights: "
                f"{_HOW_TO_START}"
            )
        different = None
        if model is not None and takes_weights:
            answer = self._rpc("served_config", {})
            with self._parsing():
                different = _difference(model, dict(answer["results"][0]))
        if different is not None:
            raise IncompatibleServer(
                f"{self.url} serves another model than the one that is trained: {different}; "
                "start it from that model's directory, or from the versions in vllm.weights_dir"
            )
        return int(_find(config, "max_num_seqs") or 1)

    def check_health(self) -> None:
        self._call("GET", "/health", self._settings.check_timeout)

    def weight_label(self) -> str:
        """The label of the loaded weights. May be slow: the engine responds between two steps."""
        answer = self._call("GET", "/weight_info", self._settings.generate_timeout)
        with self._parsing():
            return str(answer["weight_version"])

    def prefix_cache(self) -> PrefixCache:
        answer = self._answer("GET", "/metrics", self._settings.check_timeout)
        return _prefix_cache(answer.text)

    def generate(self, request: Request, request_id: str, other_weights: int | None) -> Generation:
        """Generates tokens; those from unpublished weights get the version `other_weights`.

        With `other_weights` None, unpublished weights are an error. `request_id` is the argument of
        `abort`.
        """
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
            "ignore_eos": True,  # only the stop tokens of the request count, as in every engine
        }
        if how.stop_strings:
            sampling["stop"] = list(how.stop_strings)
        body = {
            "request_id": request_id,
            "model": self._model,
            "token_ids": list(request.prompt_ids),
            "sampling_params": sampling,
        }
        timeout = self._settings.generate_timeout
        answer = self._call("POST", "/inference/v1/generate", timeout, body)
        with self._parsing():
            return self._generation(answer["choices"][0], other_weights)

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
                    f"{self.url} sampled from weights {span['version']!r}: it was restarted"
                )
            versions += [number] * (int(span["end"]) - int(span["start"]))
        if not len(ids) == len(log_probs) == len(versions):
            raise ServerFailure(
                f"{self.url} returned {len(ids)} tokens, {len(log_probs)} log-probs and "
                f"{len(versions)} weight versions"
            )
        return Generation(tuple(ids), tuple(log_probs), tuple(versions), reason)

    def abort(self, request_ids: list[str]) -> None:
        """Ends generations; their `generate` calls raise ServerFailure."""
        body = {"request_ids": [_ID_PREFIX + request_id for request_id in request_ids]}
        self._call("POST", "/inference/v1/abort_requests", self._settings.check_timeout, body)

    def load(self, root: Path, identity: Identity) -> float:
        """Loads a published version; returns the seconds for which generation was paused.

        The server first reads and checks the files. Then generations in flight are paused, the
        weights are swapped, the cache of the old ones is dropped, and generations continue.
        """
        self._fetch(root, identity)
        began = time.monotonic()
        update = self._settings.update_timeout
        self._call("POST", "/pause?mode=keep", update)
        self._call("POST", "/start_weight_update", update)
        self._call("POST", "/update_weights", update, {"update_info": dataclasses.asdict(identity)})
        self._call("POST", "/finish_weight_update", update, {"weight_version": label_of(identity)})
        self._call("POST", "/reset_prefix_cache?reset_running_requests=true", update)
        self.resume()
        return time.monotonic() - began

    def resume(self) -> None:
        """Continues generations that were paused."""
        self._call("POST", "/resume", self._settings.update_timeout)

    def _fetch(self, root: Path, identity: Identity) -> None:
        where = {"directory": str(root.absolute()), "number": identity.number}
        self._rpc("fetch_weights", where)
        limit = self._settings.fetch_timeout
        deadline = time.monotonic() + limit
        while True:
            answer = self._rpc("fetched_weights", {})
            with self._parsing():
                workers = answer["results"]
                problems = [worker["error"] for worker in workers if worker["error"]]
            if problems:
                raise ServerFailure(
                    f"{self.url} cannot take version {identity.number}: {problems[0]}"
                )
            if not any(worker["busy"] for worker in workers):
                break
            if time.monotonic() > deadline:
                raise ServerFailure(
                    f"{self.url} did not read version {identity.number} in {limit:g} s"
                )
            time.sleep(0.05)
        if any(worker["held"] != dataclasses.asdict(identity) for worker in workers):
            raise ServerFailure(f"{self.url} read a different version {identity.number} in {root}")

    def _rpc(self, method: str, arguments: dict[str, Any]) -> Any:
        body = {"method": method, "kwargs": arguments}
        return self._call("POST", "/collective_rpc", self._settings.update_timeout, body)

    @contextlib.contextmanager
    def _parsing(self) -> Iterator[None]:
        """Converts errors in parsing a response to ServerFailure."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerFailure(f"{self.url} gave an unexpected answer: {error!r}") from None

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
        inference = path.startswith("/inference")
        session = self._generations if path.endswith("/generate") else self._control
        limits = (min(timeout, self._settings.check_timeout), timeout)
        try:
            answer = session.request(method, self.url + path, body, limits)
        except requests.RequestException as error:
            raise ServerFailure(f"{self.url} does not answer ({type(error).__name__})") from None
        if answer.status_code >= 400:
            said = f"{self.url}{path} answered {answer.status_code}: {_message(answer)}"
            if inference and answer.status_code in (400, 413, 422):
                raise RequestRefused(said)
            if answer.status_code == 401:
                raise IncompatibleServer(f"{said}; {_HOW_TO_GIVE_A_KEY}")
            if answer.status_code == 404:
                raise IncompatibleServer(f"{said}; {_HOW_TO_START}")
            raise ServerFailure(said)
        return answer

    def break_off(self) -> None:
        """Makes generations in flight fail at once with ServerFailure."""
        self._generations.break_off()

    def close(self) -> None:
        """Makes all calls in flight, and all later calls, fail."""
        self._control.close()
        self._generations.close()


def _message(answer: requests.Response) -> str:
    try:
        error = answer.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError):
        return answer.text[:300]


def _prefix_cache(text: str) -> PrefixCache:
    """Summed over all engines of the server, from Prometheus' text format."""
    counts = {"queries": 0.0, "hits": 0.0}
    for line in text.splitlines():
        name = line.partition("{")[0]
        for key in counts:
            if name == f"vllm:prefix_cache_{key}_total":
                counts[key] += float(line.rpartition(" ")[2])
    return PrefixCache(int(counts["queries"]), int(counts["hits"]))


def _difference(model: Architecture, served: dict[str, Any]) -> str | None:
    """How a served model, given its `config.json`, differs; None if it is equivalent."""
    try:
        other = from_hf_config(served, "its config.json")
    except ModelError as error:
        return str(error)
    names = [field.name for field in dataclasses.fields(model) if field.name not in _NOT_COMPARED]
    values = [(name, getattr(other, name), getattr(model, name)) for name in names]
    unlike = [f"{name} is {there} and not {here}" for name, there, here in values if there != here]
    return ", ".join(unlike) or None


def _find(config: Any, key: str) -> Any:
    """The value of a key anywhere in nested dictionaries."""
    if not isinstance(config, dict):
        return None
    if key in config:
        return config[key]
    found = (_find(value, key) for value in config.values())
    return next((value for value in found if value is not None), None)
