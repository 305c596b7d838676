"""Groups of recorded episodes, from the trajectory files of earlier runs, to train on offline.

The files contain exact tokens and rewards, so nothing is played or scored again. Which groups a
step gets depends only on the seed and the step: a resumed run continues with the same ones.
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from manus_jax.errors import UserError
from manus_jax.limits import shown
from manus_jax.rollout.trajectory import Trajectory
from manus_jax.rollout.trajectory_files import read_trajectories

Usable = Callable[[Sequence[Trajectory]], list[Trajectory]]
"""A group's episodes → those that can be trained on."""


class RecordedError(UserError, ValueError):
    """Recorded episodes that cannot be trained on."""


def read_recorded(
    paths: Sequence[str], max_length: int, vocab_size: int, vocabulary: Mapping[str, int]
) -> list[Trajectory]:
    """The training episodes of runs, or of single trajectory files, that have tokens.

    Raises for a path without any, for tokens that do not fit into rows of `max_length` or into the
    model's embedding of `vocab_size`, and for a run with another vocabulary.
    """
    found: list[Trajectory] = []
    for number, path in enumerate(paths):
        tokenizer = Path(path).expanduser() / "model" / "tokenizer.json"
        if tokenizer.is_file() and _vocabulary(tokenizer) != vocabulary:
            raise RecordedError(
                f"train.trajectories: {path} has another tokenizer than the model in model.path"
            )
        episodes = [e for file in _files(Path(path).expanduser()) for e in _episodes(file)]
        if not episodes:
            raise RecordedError(f"train.trajectories: {path} has no episodes with tokens")
        counts = collections.Counter(episode.uid for episode in episodes)
        if (twice := max(counts, key=lambda uid: counts[uid])) and counts[twice] > 1:
            raise RecordedError(
                f"train.trajectories: {path} has several episodes {twice!r}; files of different "
                "runs are listed separately"
            )
        for episode in episodes:
            if problem := _problem(episode):
                raise RecordedError(
                    f"train.trajectories: {path}: episode {episode.uid!r} {problem}"
                )
        for segment in (segment for episode in episodes for segment in episode.segments):
            if len(segment) > max_length:
                raise RecordedError(
                    f"train.trajectories: {path} has a sequence of {len(segment)} tokens, more "
                    f"than data.max_length = {max_length}"
                )
            if segment.token_ids.max() >= vocab_size:
                raise RecordedError(
                    f"train.trajectories: {path} has the token {segment.token_ids.max()}, and the "
                    f"model has a vocabulary of {vocab_size}; it is of another model"
                )
        found += [_renamed(episode, number) for episode in episodes]
    return found


def _vocabulary(file: Path) -> Mapping[str, int]:
    try:
        return Tokenizer.from_file(str(file)).get_vocab()
    except Exception as error:  # the library raises no narrower class
        reason = " ".join(str(error).split())
        raise RecordedError(f"train.trajectories: {file} is damaged: {reason}") from None


def _problem(episode: Trajectory) -> str | None:
    """Why an episode cannot be trained on, as the end of a sentence."""
    numbers = [episode.env_reward, *(x for t in episode.turns for x in (t.reward, t.penalty))]
    if episode.score is not None:
        numbers += [episode.score.total, *(episode.score.turn_scores or ())]
    if not all(type(x) in (int, float) and math.isfinite(x) for x in numbers):
        return "has a reward that is not a finite number"
    if type(episode.success) is not bool:
        return f"has the success {shown(episode.success)}, which is not true or false"
    for segment in episode.segments:
        if not len(segment) or segment.token_ids.min() < 0:
            return "has an empty sequence or a negative token"
        if not np.isfinite(segment.log_probs).all():
            return "has a log-prob that is not finite"
    return None


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise RecordedError(f"train.trajectories: {path} does not exist")
    if not path.is_dir():
        return [path]
    numbered = [f for f in (path / "trajectories").glob("*.jsonl") if f.stem.isdecimal()]
    return sorted(numbered, key=lambda file: int(file.stem))


def _episodes(file: Path) -> list[Trajectory]:
    try:
        read = list(read_trajectories(file))
    except (OSError, ValueError) as error:
        raise RecordedError(f"train.trajectories: {error}") from None
    return [e for e in read if isinstance(e, Trajectory) and e.segments]


def _renamed(episode: Trajectory, number: int) -> Trajectory:
    """Different runs use the same names."""
    spec = dataclasses.replace(
        episode.spec, uid=f"{number}/{episode.uid}", group_id=f"{number}/{episode.group_id}"
    )
    parent = episode.parent and f"{number}/{episode.parent}"
    return dataclasses.replace(episode, spec=spec, parent=parent)


class RecordedGroups:
    """The groups that can be trained on, `size` per step; every epoch has another order."""

    def __init__(
        self, episodes: Sequence[Trajectory], usable: Usable, size: int, seed: int
    ) -> None:
        groups: dict[str, list[Trajectory]] = {}
        for episode in episodes:
            groups.setdefault(episode.group_id, []).append(episode)
        kept = [usable(group) for group in groups.values()]
        self._groups = [group for group in kept if group]
        if not self._groups:
            raise RecordedError(
                f"train.trajectories: none of {len(groups)} groups has episodes that "
                "algorithm.recipe can learn from"
            )
        self._size, self._seed = min(size, len(self._groups)), seed
        digest = hashlib.sha256()
        for episode in episodes:
            digest.update(f"{episode.uid} {episode.episode_reward!r}\n".encode())
            for segment in episode.segments:
                digest.update(segment.token_ids.tobytes() + segment.log_probs.tobytes())
        self.fingerprint = digest.hexdigest()[:32]

    def check(self, fingerprint: str | None) -> None:
        """Raises RecordedError if a resumed run had other episodes; None: it is unknown."""
        if fingerprint not in (None, self.fingerprint):
            raise RecordedError(
                "train.trajectories: their episodes are not those that this run began with; "
                "restore the files, or choose another run_dir"
            )

    def take(self, step: int) -> list[Trajectory]:
        """The episodes of a step; the last groups of an epoch that are too few are left out."""
        epoch, batch = divmod(step - 1, len(self._groups) // self._size)
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._groups))
        chosen = order[batch * self._size :][: self._size]
        return [episode for number in chosen for episode in self._groups[number]]
