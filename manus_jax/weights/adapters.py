"""Publishes versions of adapters, each a PEFT directory, for servers that have the base model."""

import shutil
import threading
import uuid
from collections import Counter
from pathlib import Path

from manus_jax.files import CHECKSUMS, lock_directory, remove_directory, remove_unfinished
from manus_jax.models.adapter_files import Adaptation, AdapterWeights, save_adapter
from manus_jax.models.huggingface import ModelCard
from manus_jax.weights.manifest import Identity, label_of
from manus_jax.weights.publisher import Published, disk_errors

_KEPT = 2  # the newest one, and one that a slow server may still be loading


class AdapterPublisher:
    """Writes adapters to directories of `root` that are named by `label_of`.

    The newest ones are kept, and those in `used`, which counts the requests in flight by label and
    is guarded by `lock`: a server may drop an adapter and read it again while a request uses it.
    """

    def __init__(self, root: Path, card: ModelCard, adaptation: Adaptation) -> None:
        self.root, self.card, self.adaptation = root, card, adaptation
        self.lock, self.used = threading.Lock(), Counter[str]()
        self._written: list[str] = []
        with disk_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(root)
            remove_unfinished(root, CHECKSUMS)
            for leftover in root.glob("*-*/"):  # of an earlier run
                shutil.rmtree(leftover)

    def publish(self, weights: AdapterWeights, version: int) -> Published:
        """Writes a version, which is complete when this returns."""
        identity = Identity(version, uuid.uuid4().hex)
        label, arch = label_of(identity), self.card.architecture
        directory = self.root / label
        with disk_errors(self.root):
            save_adapter(weights.adapters, weights.adaptation, weights.base, arch, directory)
            self._written.append(label)
            with self.lock:
                old = [name for name in self._written[:-_KEPT] if not self.used[name]]
            for name in old:
                remove_directory(self.root / name, CHECKSUMS)
                self._written.remove(name)
            size = sum(path.stat().st_size for path in directory.iterdir())
        return Published(identity, 0, 0, None, size)

    def close(self) -> None:
        self._lock.close()
