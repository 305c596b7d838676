"""Small tokenizers with the chat templates and control tokens of public models."""

import copy
from pathlib import Path
from typing import Any

from scripted_engine import small_tokenizer

QWEN25, QWEN3 = (
    (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    for name in ("qwen2_5", "qwen3")
)
# In the manner of Llama 3.2: tools in the first user turn, replies from "ipython", today's date.
LLAMA = (
    "{{- '<|im_start|>system\n\nToday Date: ' + (date_string if date_string is defined else "
    "strftime_now('%d %b %Y')) + '<|im_end|>' }}"
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}{% set call = m.tool_calls[0].function %}"
    '{{- \'<|im_start|>assistant\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{- call.arguments | tojson + '}<|im_end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|im_start|>ipython\n\n' + m.content | tojson + '<|im_end|>' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n\n' }}"
    "{%- if loop.first and tools %}{%- for t in tools %}{{- t | tojson + '\n\n' }}{%- endfor %}"
    "{%- endif %}{{- m.content | trim + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}"
)
# Opens the thought in the prompt, as QwQ and DeepSeek-R1 do.
OPENING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + "
    "'<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


def tokenizer_with(template: str) -> Any:
    tokenizer = copy.deepcopy(_SMALL)
    tokenizer.chat_template = template
    return tokenizer


_SMALL = small_tokenizer()
