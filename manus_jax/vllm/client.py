"""One vLLM server over HTTP: tokens in and out, and new weights while it runs.

Uses vLLM's token-in-token-out route and its routes for reinforcement learning. Errors distinguish
an invalid request, which every server would refuse, from a failed server, in which case another
server can take the request. What a server returns is checked before anything is trained on it.
"""

import base64
import contextlib
import dataclasses
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from manus_jax.config.server_settings import VllmSettings
from manus_jax.engines.protocol import EngineError, FinishReason, Generation, Request
from manus_jax.models.architecture import Architecture, ModelError, from_hf_config
from manus_jax.servers.bounded_http import BadResponse, parse_json
from manus_jax.vllm.access import KEY_VARIABLE
from manus_jax.vllm.http_connections import Connections
from manus_jax.weights.manifest import Identity, label_of

# vLLM prepends this to the id of a request.
_ID_PREFIX = "generate-tokens-"
_FINISHED: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
_HOW_TO_GIVE_A_KEY = f"give the key that it was started with in {KEY_VARIABLE}"
_HOW_TO_START = "start it with `python -m manus_jax.serve`"
_MAX_BYTES = 64 << 20  # of a response; 32,000 tokens with their log-probs take 3 MB
_LOWEST_LOG_PROB = -9999.0  # vLLM's value for -inf, the log-prob of what cannot be sampled
_MAX_REQUESTS = 100_000  # at once; more is not credible
_NOT_COMPARED = ("max_positions", "initializer_range")  # they do not affect the forward pass

VersionOf = Callable[[str], int | None]
"""The version of weights, given a server's label of them; None: they must not be used."""


class ServerFailure(EngineError):
    """The server cannot serve the request now; another one may."""


class BadAnswer(ServerFailure):
    """The server answers, but not as vLLM does."""


class IncompatibleServer(ServerFailure):
    """The server answers but cannot be used until it is started differently."""


class RequestRefused(EngineError):
    """The request is at fault; no server will accept it."""


@dataclasses.dataclass(frozen=True)
class ServerLoad:
    """What a server says about its load, summed over its engines; `kv_usage` is their maximum."""

    queries: int = 0  # prompt tokens looked up in the prefix cache since the start
    hits: int = 0  # those found
    waiting: int = 0  # requests that it has not started
    kv_usage: float = 0.0  # share of the KV cache that running requests use


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
        self._settings = settings or VllmSettings(urls=(self.url,), push=False)
        self._model = self.model_path = self.dtype = ""
        self._routing: tuple[int, int, int] | None = None  # layers, experts per token, experts
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._control = Connections(self.url, headers)
        self._generations = Connections(self.url, headers)

    def examine(self, max_length: int, push: bool, model: Architecture | None) -> int:
        """How many requests the server runs at once; IncompatibleServer if it cannot be used.

        Sets `model_path`, the directory of the served model, and `dtype`, the type it computes in.

        Args:
          max_length: the context that is needed.
          push: whether it must take weights.
          model: the architecture that it must serve; None: any.
        """
        try:
            return self._examine(max_length, push, model)
        except BadAnswer as error:
            raise IncompatibleServer(f"{error}; it is not a vLLM server: {_HOW_TO_START}") from None

    def _examine(self, max_length: int, push: bool, model: Architecture | None) -> int:
        context = self.read_model()
        # The first call is slow: it also collects information about the machine.
        answer = self._call("GET", "/server_info?config_format=json", self._settings.update_timeout)
        with self._parsing("/server_info"):
            config = dict(answer["vllm_config"])
            mode = _find(config, "logprobs_mode")
            transfer = _find(config, "weight_transfer_config") or {}
            has_plugin = transfer.get("backend") == "manus_jax"
            max_rank = int((_find(config, "lora_config") or {}).get("max_lora_rank", 0))
            max_requests = int(_find(config, "max_num_seqs"))
            returns_experts = bool(_find(config, "enable_return_routed_experts"))
            self.dtype = str(_find(config.get("model_config"), "dtype")).removeprefix("torch.")
            if not 1 <= max_requests <= _MAX_REQUESTS:
                raise ValueError(f"max_num_seqs = {max_requests}")
        if mode != "processed_logprobs":
            raise IncompatibleServer(
                f"{self.url} reports {mode}, which differ from the distribution it samples from; "
                f"give it --logprobs-mode processed_logprobs, or {_HOW_TO_START}"
            )
        if context < max_length:
            raise IncompatibleServer(
                f"{self.url} has a context of {context} tokens and {max_length} are needed: "
                f"start it with --max-length {max_length}, or set rollout.max_total_tokens = "
                f"{context}"
            )
        if push and not has_plugin:
            raise IncompatibleServer(
                f"{self.url} was started without this project's plug-in and takes no weights: "
                f"{_HOW_TO_START}"
            )
        if self._settings.router_replay and not returns_experts:
            raise IncompatibleServer(
                f"{self.url} does not return experts, which vllm.router_replay needs: start it "
                "with `python -m manus_jax.serve ... -- --enable-return-routed-experts`"
            )
        if push:
            self._check_lora(max_rank)
        if model is not None and model.num_experts:
            self._routing = model.num_layers, model.experts_per_token, model.num_experts
        different = None
        if model is not None and has_plugin:
            answer = self._rpc("served_config", {})
            with self._parsing("/collective_rpc"):
                different = _difference(model, dict(answer["results"][0]))
        if different is not None:
            raise IncompatibleServer(
                f"{self.url} serves another model than the one that is trained: {different}; "
                "start it from that model's directory, or from the versions in vllm.weights_dir"
            )
        return max_requests

    def _check_lora(self, max_rank: int) -> None:
        """Raises IncompatibleServer, given the highest rank of adapters; 0: it takes none."""
        if max_rank:
            raise IncompatibleServer(
                f"{self.url} takes LoRA adapters only: start it without --lora-rank"
            )

    def read_model(self) -> int:
        """Sets `model_path`; returns the context of the served model in tokens."""
        models = self._call("GET", "/v1/models", self._settings.check_timeout)
        with self._parsing("/v1/models"):
            served = models["data"][0]
            self._model, self.model_path = str(served["id"]), str(served["root"])
            return int(served["max_model_len"])

    def check_health(self) -> None:
        self._call("GET", "/health", self._settings.check_timeout)

    def weight_label(self) -> str:
        """The label of the loaded weights. May be slow: the engine responds between two steps."""
        answer = self._call("GET", "/weight_info", self._settings.generate_timeout)
        with self._parsing("/weight_info"):
            return str(answer["weight_version"])

    def load_metrics(self) -> ServerLoad:
        content = self._content("GET", "/metrics", self._settings.check_timeout)
        with self._parsing("/metrics"):
            return _server_load(content.decode())

    def generate(
        self,
        request: Request,
        request_id: str,
        version_of: VersionOf,
        vocab_size: int | None,
    ) -> Generation:
        """Generates tokens.

        Args:
          request: the prompt and how to sample.
          request_id: the argument of `abort`.
          version_of: the versions of the server's labels.
          vocab_size: of the model; None: not known.
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
        if self._settings.router_replay:
            sampling["routed_experts_prompt_start"] = request.known_experts
        timeout = self._settings.generate_timeout
        with self._named_weights(version_of) as (model, version_of):
            body = {
                "request_id": request_id,
                "model": model,
                "token_ids": list(request.prompt_ids),
                "sampling_params": sampling,
            }
            answer = self._call("POST", "/inference/v1/generate", timeout, body)
        with self._parsing("/inference/v1/generate"):
            choice = answer["choices"][0]
            made = self._generation(choice, version_of)
            _check_generation(made, request, vocab_size)
            if self._settings.router_replay:
                experts = self._experts(choice["routed_experts"], request, made)
                made = dataclasses.replace(made, experts=experts)
        return made

    @contextlib.contextmanager
    def _named_weights(self, version_of: VersionOf) -> Iterator[tuple[str, VersionOf]]:
        """The model that a request names, and the versions of the labels in its response.

        The server keeps the weights of that model until the block ends.
        """
        yield self._model, version_of

    def _experts(self, encoded: str, request: Request, made: Generation) -> np.ndarray:
        """The experts of a generation, sent as a file of NumPy in base64."""
        try:
            experts = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        except (OSError, EOFError) as error:
            raise ValueError(f"experts are not an array: {error}") from None
        tokens = len(request.prompt_ids) + len(made.token_ids) - 1 - request.known_experts
        layers, per_token, count = self._routing or (*experts.shape[1:], np.inf)
        if experts.shape != (tokens, layers, per_token) or experts.dtype.kind not in "iu":
            raise ValueError(f"experts {experts.dtype} {experts.shape} of {tokens} tokens")
        if experts.size and not 0 <= experts.min() <= experts.max() < count:
            raise ValueError(f"experts {experts.min()}..{experts.max()} of {count}")
        return experts

    def _generation(self, choice: dict[str, Any], version_of: VersionOf) -> Generation:
        reason = _FINISHED.get(choice["finish_reason"])
        if reason is None:
            raise ServerFailure(f"{self.url} ended a generation with {choice['finish_reason']!r}")
        ids = choice["token_ids"]
        entries = choice["logprobs"]["content"]
        if any(type(i) is not int for i in ids) or [entry["token_id"] for entry in entries] != ids:
            raise ValueError(f"{len(ids)} tokens, and log-probs of {len(entries)} other tokens")
        versions: list[int] = []
        for span in choice["weight_versions"]:
            version = version_of(span["version"])
            if version is None:
                raise ServerFailure(
                    f"{self.url} sampled from weights {span['version']!r}, which it was not given: "
                    "it was restarted, or it is used by another learner too"
                )
            if span["start"] != len(versions) or span["end"] > len(ids):
                raise ValueError(f"weight versions of other tokens: {span}")
            versions += [version] * (span["end"] - span["start"])
        if len(versions) != len(ids):
            raise ValueError(f"{len(ids)} tokens and {len(versions)} weight versions")
        log_probs = tuple(float(entry["logprob"]) for entry in entries)
        return Generation(tuple(ids), log_probs, tuple(versions), reason)

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
        self.resume()
        return time.monotonic() - began

    def resume(self) -> None:
        """Drops the cache of other weights and continues generations that were paused."""
        update = self._settings.update_timeout
        self._call("POST", "/reset_prefix_cache?reset_running_requests=true", update)
        self._call("POST", "/resume", update)

    def _fetch(self, root: Path, identity: Identity) -> None:
        where = {"directory": str(root.absolute()), "number": identity.number}
        self._rpc("fetch_weights", where)
        held = self._await_fetched(identity)
        if not held or any(version != dataclasses.asdict(identity) for version in held):
            raise ServerFailure(f"{self.url} read a different version {identity.number} in {root}")

    def _await_fetched(self, identity: Identity) -> list[Any]:
        """What each worker holds, when all have read a version; ServerFailure if one cannot."""
        limit = self._settings.fetch_timeout
        deadline = time.monotonic() + limit
        while True:
            answer = self._rpc("fetched_weights", {})
            with self._parsing("/collective_rpc"):
                workers = answer["results"]
                problems = [worker["error"] for worker in workers if worker["error"]]
                busy = any(worker["busy"] for worker in workers)
                held = [worker["held"] for worker in workers]
            if problems:
                raise ServerFailure(
                    f"{self.url} cannot take version {identity.number}: {problems[0]}"
                )
            if not busy:
                return held
            if time.monotonic() > deadline:
                raise ServerFailure(
                    f"{self.url} did not read version {identity.number} in {limit:g} s"
                )
            time.sleep(0.05)

    def _rpc(self, method: str, arguments: dict[str, Any]) -> Any:
        body = {"method": method, "kwargs": arguments}
        return self._call("POST", "/collective_rpc", self._settings.update_timeout, body)

    @contextlib.contextmanager
    def _parsing(self, path: str) -> Iterator[None]:
        """Converts errors in reading a response to BadAnswer."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            problem = " ".join(repr(error).split())[:200]
            raise BadAnswer(f"{self.url}{path} gave an unexpected answer: {problem}") from None

    def _call(self, method: str, path: str, timeout: float, body: Any = None) -> Any:
        content = self._content(method, path, timeout, body)
        if not content:
            return None
        try:
            return parse_json(content)
        except BadResponse as error:
            raise BadAnswer(f"the answer of {self.url}{path} {error}") from None

    def _content(self, method: str, path: str, timeout: float, body: Any = None) -> bytes:
        connections = self._generations if path.endswith("/generate") else self._control
        connect = min(timeout, self._settings.check_timeout)
        try:
            status, content = connections.request(
                method,
                path,
                body,
                connect_seconds=connect,
                seconds=timeout,
                max_bytes=_MAX_BYTES,
            )
        except TimeoutError:
            raise ServerFailure(
                f"{self.url} does not answer: {path} took more than {timeout:g} s"
            ) from None
        except OSError as error:
            raise ServerFailure(f"{self.url} does not answer ({type(error).__name__})") from None
        except BadResponse as error:
            raise BadAnswer(f"the answer of {self.url}{path} {error}") from None
        if 200 <= status < 300:
            return content
        problem = f"{self.url}{path} answered {status}: {_message(content)}"
        if path.startswith("/inference") and status in (400, 413, 422):
            raise RequestRefused(problem)
        if status in (401, 403):
            raise IncompatibleServer(f"{problem}; {_HOW_TO_GIVE_A_KEY}")
        if status < 400 or status in (404, 405):
            raise IncompatibleServer(f"{problem}; {_HOW_TO_START}")
        raise ServerFailure(problem)

    def break_off(self) -> None:
        """Makes generations in flight fail at once with ServerFailure."""
        self._generations.break_off()

    def close(self) -> None:
        """Makes all calls in flight, and all later calls, fail."""
        self._control.close()
        self._generations.close()


def _check_generation(made: Generation, request: Request, vocab_size: int | None) -> None:
    """Raises ValueError for what no server can have sampled for the request."""
    ids, how = made.token_ids, request.sampling
    if vocab_size is not None and not all(0 <= i < vocab_size for i in ids):
        raise ValueError(f"token ids {min(ids)}..{max(ids)}, and the model has {vocab_size}")
    # Rounding may raise the log-prob of a certain token slightly above 0; NaN fails both sides.
    if not all(_LOWEST_LOG_PROB < log_prob < 0.01 for log_prob in made.log_probs):
        wrong = [x for x in made.log_probs if not _LOWEST_LOG_PROB < x < 0.01]
        raise ValueError(f"the log-prob {wrong[0]} of a sampled token")
    full = len(ids) == how.max_tokens
    if not ids or len(ids) > how.max_tokens or (made.finish_reason == "length" and not full):
        raise ValueError(f"{len(ids)} tokens of {how.max_tokens}, ended by {made.finish_reason!r}")
    if any(i in how.stop_ids for i in ids[:-1]):
        raise ValueError("tokens after a stop token")
    if made.finish_reason == "stop" and ids[-1] not in how.stop_ids and not how.stop_strings:
        raise ValueError(f"a generation ended with {ids[-1]}, which is not a stop token")


def _message(content: bytes) -> str:
    try:
        error = parse_json(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (BadResponse, LookupError, TypeError):
        return content[:300].decode(errors="replace")


def _server_load(text: str) -> ServerLoad:
    """From Prometheus' text format."""
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_requests_waiting")
    found: dict[str, list[float]] = {f"vllm:{n}": [0.0] for n in (*names, "kv_cache_usage_perc")}
    for line in text.splitlines():
        name = line.partition("{")[0]
        if name in found:
            found[name].append(float(line.rpartition(" ")[2]))
    queries, hits, waiting = (int(sum(found[f"vllm:{name}"])) for name in names)
    return ServerLoad(queries, hits, waiting, max(found["vllm:kv_cache_usage_perc"]))


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
