"""A vLLM server whose versions are LoRA adapters over the base model that it serves.

Every version is an adapter with a name of its own, which requests give as their model. Nothing is
paused: requests in flight finish on the adapter that they started with, later ones use the newest,
and an adapter that no request uses any more is unloaded with the next update.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from manus_jax.config.server_settings import VllmSettings
from manus_jax.models.adapter_files import fingerprint_of_tensors
from manus_jax.models.architecture import Architecture
from manus_jax.vllm.client import IncompatibleServer, ServerFailure, VersionOf, VllmServer
from manus_jax.weights.adapters import AdapterPublisher
from manus_jax.weights.manifest import Identity, label_of
from manus_jax.weights.publisher import Publisher

_UNCHANGED = "default"  # vLLM's label of the weights that it started with
MERGED = "set vllm.adapters = False to send merged weights"


class AdapterServer(VllmServer):
    """Takes the adapters of a publisher, of a rank up to `rank`.

    Without a publisher it can only be examined, and its base is not compared.
    """

    def __init__(
        self,
        url: str,
        settings: VllmSettings,
        api_key: str | None,
        rank: int,
        publisher: AdapterPublisher | None = None,
    ) -> None:
        super().__init__(url, settings, api_key)
        self._rank, self._publisher = rank, publisher
        self._adapter = ""  # the newest; guarded by the publisher's lock

    def _check_lora(self, max_rank: int) -> None:
        if max_rank < self._rank:
            takes = f"adapters up to rank {max_rank} only" if max_rank else "no LoRA adapters"
            raise IncompatibleServer(
                f"{self.url} takes {takes}, and lora.rank is {self._rank}: start it with `python "
                f"-m manus_jax.serve --lora-rank {self._rank}`, or {MERGED}"
            )

    def _examine(self, max_length: int, push: bool, model: Architecture | None) -> int:
        max_requests = super()._examine(max_length, push, model)
        if self._publisher is not None:
            self._check_base(self._publisher)
        return max_requests

    def _check_base(self, publisher: AdapterPublisher) -> None:
        """Raises IncompatibleServer if the served model is not the base of the adapters."""
        if super().weight_label() != _UNCHANGED:
            raise IncompatibleServer(f"{self.url} has been given other weights: restart it")
        wanted = publisher.adaptation
        answer = self._rpc("base_checksums", {})
        with self._parsing("/collective_rpc"):
            checksums = dict(answer["results"][0])
            found = fingerprint_of_tensors(checksums, publisher.card.architecture)
        if wanted.fingerprint not in (None, found):
            raise IncompatibleServer(
                f"{self.url} serves {self.model_path}, whose weights are not those of the base of "
                f"the adapters, {wanted.base}: start it with a copy of that, or {MERGED}"
            )

    def _listed(self) -> dict[str, str]:
        """The adapters that the server has: their directories by name."""
        models = self._call("GET", "/v1/models", self._settings.check_timeout)
        with self._parsing("/v1/models"):
            return {str(m["id"]): str(m["root"]) for m in models["data"] if m.get("parent")}

    def weight_label(self) -> str:
        """The name of the newest adapter; "" if the server does not have it any more."""
        return self._adapter if self._adapter in self._listed() else ""

    @contextlib.contextmanager
    def _named_weights(self, version_of: VersionOf) -> Iterator[tuple[str, VersionOf]]:
        assert self._publisher is not None
        lock, used = self._publisher.lock, self._publisher.used
        with lock:
            adapter = self._adapter
            used[adapter] += 1
        try:
            yield adapter, lambda base: version_of(adapter) if base == _UNCHANGED else None
        finally:
            with lock:
                used[adapter] -= 1

    def load(self, root: Path, identity: Identity) -> float:
        """Loads a published adapter and unloads those that no request uses."""
        assert self._publisher is not None
        label, update = label_of(identity), self._settings.update_timeout
        directory = (root / label).absolute()
        self._rpc("check_adapter", {"directory": str(directory)})
        self._await_fetched(identity)
        listed = self._listed()
        if label not in listed:  # it is if an earlier attempt was cut off
            body = {"lora_name": label, "lora_path": str(directory)}
            self._content("POST", "/v1/load_lora_adapter", update, body)
        with self._publisher.lock:
            self._adapter = label
            used = {name for name, count in self._publisher.used.items() if count}
        for name, path in listed.items():
            if name not in {label, *used} and Path(path).parent == directory.parent:
                with contextlib.suppress(ServerFailure):  # tried again with the next update
                    self._content("POST", "/v1/unload_lora_adapter", update, {"lora_name": name})
        return 0.0

    def resume(self) -> None:
        """Nothing to do: an adapter's cache has its own keys, and nothing was paused."""


def connect(
    url: str,
    settings: VllmSettings,
    api_key: str | None,
    publisher: Publisher | AdapterPublisher | None,
) -> VllmServer:
    """A server that takes the publisher's versions: whole models or adapters."""
    if isinstance(publisher, AdapterPublisher):
        rank = publisher.adaptation.lora.rank
        return AdapterServer(url, settings, api_key, rank, publisher)
    return VllmServer(url, settings, api_key)
