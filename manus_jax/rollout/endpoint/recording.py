"""The requests of an episode as exact tokens.

A client of the chat API sends the whole conversation with every request. If its messages extend
those of an earlier request and the model's reply to it, the prompt extends the tokens of that
reply: the same ids, followed by what the chat template writes for the new messages. Any other
request is a new prompt. Replies that continue each other form one segment of the trajectory; a
second continuation of the same reply, or another conversation, starts a new segment.
"""

import dataclasses
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

from manus_jax.data.chat import ChatTemplateError, Message, ToolSchemas
from manus_jax.engines.protocol import Generation
from manus_jax.rollout.llm_player import ChatTokenizer
from manus_jax.rollout.token_stream import TokenStream
from manus_jax.rollout.trajectory import Segment, Turn


@dataclasses.dataclass(eq=False)
class Reply:
    """A completed request."""

    prompt: "Prompt"
    generation: Generation
    text: str  # of all tokens
    message: Message  # as the client got it
    sequence: int
    seconds: float
    continued: bool = False  # a later prompt is in the same sequence
    actions: list[str] = dataclasses.field(default_factory=list)
    observations: list[str] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    rejected: bool = False
    environment_seconds: float = 0.0

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens up to the end of the reply."""
        return self.prompt.ids + self.generation.token_ids


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a request. `sequence` numbers the token sequences of an episode."""

    messages: tuple[Message, ...]
    tools: ToolSchemas
    ids: tuple[int, ...]
    sequence: int
    extends: Reply | None  # the reply whose tokens these ids extend
    claimed: Reply | None  # the same, if this prompt is in its sequence


class Recording:
    """The requests of one episode; thread-safe, because a program may send several at once."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._lock = threading.Lock()
        self._replies: list[Reply] = []
        self._sequences = itertools.count()
        self.sequences = 0  # that have been started
        self.prompts_extended = 0
        self.prompts_forked = 0

    def __len__(self) -> int:
        """The number of replies."""
        return len(self._replies)

    @property
    def replies(self) -> tuple[Reply, ...]:
        with self._lock:
            return tuple(self._replies)

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas) -> Prompt:
        """The tokens of a request. ChatTemplateError if the template rejects the messages.

        The prompt must then be completed (`add`) or given up (`give_up`).
        """
        messages = tuple(messages)
        with self._lock:
            ids: Sequence[int] | None = None
            earlier = self._extended_by(messages, tools)
            if earlier is not None:
                ids = self._extension(earlier, messages, tools)
            extends = None if ids is None else earlier
            if ids is None:
                ids = self._chat.start(messages, tools)
            claimed = None if extends is None or extends.continued else extends
            if claimed is not None:
                claimed.continued = True
            sequence = self._new_sequence() if claimed is None else claimed.sequence
            return Prompt(messages, tools, tuple(ids), sequence, extends, claimed)

    def copies(self, prompt: Prompt, count: int) -> list[Prompt]:
        """The prompt and copies of it in sequences of their own: for several replies to it."""
        with self._lock:
            return [prompt] + [
                dataclasses.replace(prompt, sequence=self._new_sequence(), claimed=None)
                for _ in range(count - 1)
            ]

    def add(
        self, prompt: Prompt, generation: Generation, text: str, message: Message, seconds: float
    ) -> None:
        """Records a reply."""
        with self._lock:
            if self._replies:
                self.prompts_extended += prompt.extends is not None
                self.prompts_forked += prompt.extends is None
            if prompt.extends is not None and not prompt.extends.observations:
                new = prompt.messages[len(prompt.extends.prompt.messages) + 1 :]
                prompt.extends.observations.append("\n".join(each.text for each in new))
            self._replies.append(Reply(prompt, generation, text, message, prompt.sequence, seconds))

    def give_up(self, prompt: Prompt) -> None:
        """The request failed: another one may continue the same reply."""
        with self._lock:
            if prompt.claimed is not None:
                prompt.claimed.continued = False

    def step(
        self, shown: tuple[str, str] | None, reward: float, rejected: bool, seconds: float
    ) -> None:
        """Records a step of the environment, which belongs to the newest reply.

        `shown` are the action and the observation, if the agent chose the action.
        """
        with self._lock:
            if not self._replies:
                return
            newest = self._replies[-1]
            if shown is not None:
                newest.actions.append(shown[0])
                newest.observations.append(shown[1])
            newest.reward += reward
            newest.rejected = rejected
            newest.environment_seconds += seconds

    def trajectory(self, reward: float = 0.0) -> tuple[tuple[Turn, ...], tuple[Segment, ...]]:
        """The turns and segments: one segment per sequence, in the order of their last replies.

        The rewards of the turns add up to `reward`; the last turn gets what the environment's steps
        leave of it.
        """
        replies = self.replies
        by_sequence: dict[int, list[Reply]] = {}
        for reply in replies:
            by_sequence.setdefault(reply.sequence, []).append(reply)
        ended = {id(reply): number for number, reply in enumerate(replies)}
        plays = any(reply.actions for reply in replies)
        turns: list[Turn] = []
        segments: list[Segment] = []
        for sequence in sorted(by_sequence.values(), key=lambda sequence: ended[id(sequence[-1])]):
            stream = TokenStream(sequence[0].prompt.ids)
            for reply in sequence:
                stream.add_given(reply.prompt.ids[len(stream) :])
                start = len(stream)
                stream.add_sampled(reply.generation, len(turns))
                turns.append(_turn(reply, len(segments), start, len(stream), plays))
            segment = stream.frozen()
            assert segment is not None
            segments.append(segment)
        if turns:
            left = reward - math.fsum(turn.reward for turn in turns)
            turns[-1] = dataclasses.replace(turns[-1], reward=turns[-1].reward + left)
        return tuple(turns), tuple(segments)

    def _new_sequence(self) -> int:
        self.sequences += 1
        return next(self._sequences)

    def _extended_by(self, messages: tuple[Message, ...], tools: ToolSchemas) -> Reply | None:
        """The newest of the longest conversations that the messages extend."""
        found: Reply | None = None
        for reply in self._replies:
            length = len(reply.prompt.messages)
            if found is not None and length < len(found.prompt.messages):
                continue
            said = (*reply.prompt.messages, reply.message)
            if (
                length + 1 < len(messages)
                and list(tools) == list(reply.prompt.tools)
                and all(map(_same, said, messages))
            ):
                found = reply
        return found

    def _extension(
        self, earlier: Reply, messages: tuple[Message, ...], tools: ToolSchemas
    ) -> tuple[int, ...] | None:
        """The tokens of messages that extend a reply; None if the template rewrites its tokens."""
        count = len(earlier.prompt.messages) + 1
        sampled = earlier.generation.token_ids
        try:
            if self._chat.follows_template:
                added, forks = self._chat.follow(messages[:count], sampled, messages[count:], tools)
                return None if forks else (*earlier.ids, *added)
            return (*earlier.ids, *self._chat.extend(sampled, *messages[count:]))
        except ChatTemplateError:  # these messages can only follow a turn that the template wrote
            return None


def _same(one: Message, other: Message) -> bool:
    """Whether two messages are the same; clients may strip white space."""
    return (one.role, one.content.strip(), one.tool_calls) == (
        other.role,
        other.content.strip(),
        other.tool_calls,
    )


def _turn(reply: Reply, segment: int, start: int, stop: int, plays: bool) -> Turn:
    """`plays`: the program plays an environment, so a turn's action is what it sent there."""
    action: str | None = reply.text
    if plays:
        action = "\n".join(reply.actions) if reply.actions else None
    return Turn(
        text=reply.text,
        action=action,
        observation="\n".join(reply.observations),
        reward=reply.reward,
        rejected=reply.rejected,
        cut=reply.generation.finish_reason == "length",
        segment=segment,
        start=start,
        stop=stop,
        generation_seconds=reply.seconds,
        environment_seconds=reply.environment_seconds,
    )


def record(recording: Recording) -> list[dict[str, Any]]:
    """The segments as JSON."""
    _, segments = recording.trajectory()
    return [
        {
            "token_ids": segment.token_ids.tolist(),
            "loss_mask": segment.loss_mask.astype(int).tolist(),
            "log_probs": segment.log_probs.tolist(),
            "versions": segment.versions.tolist(),
            "turn_ids": segment.turn_ids.tolist(),
        }
        for segment in segments
    ]
