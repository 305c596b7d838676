"""An environment for verifiers: two turns, and a rubric that counts the letters of the replies."""

import verifiers as vf
from datasets import Dataset


class TwoTurns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "And again."}]


def load_environment():
    rows = [{"question": f"Write {n}.", "answer": str(n)} for n in range(8)]

    def letters(completion, **kwargs):
        said = "".join(str(m["content"]) for m in completion if m["role"] == "assistant")
        return min(1.0, sum(c.isalpha() for c in said) / 8)

    rubric = vf.Rubric(funcs=[letters], weights=[1.0])
    return TwoTurns(max_turns=2, dataset=Dataset.from_list(rows), rubric=rubric)
