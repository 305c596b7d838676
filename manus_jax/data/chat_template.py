"""Arguments of a model's chat template: which it reads, and those that every rendering gets.

A template is a Jinja program, so its arguments are the variables that it reads and does not assign.
An argument that it does not read has no effect and is therefore an error. Every rendering uses the
same date: with the current one, prompts of the same task would differ from day to day.
"""

import datetime
import re
from collections.abc import Mapping
from typing import Any

import jinja2
from jinja2 import meta, nodes

from manus_jax.config.settings import ChatSettings
from manus_jax.errors import UserError

DATE = datetime.date(2024, 7, 26)
"""The date for templates that insert the current one; Llama 3's templates fall back to it, too."""

THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments with which templates turn thinking on and off."""

_SET_BY_PROGRAM = {"messages", "tools", "documents", "add_generation_prompt"}
# The tag marks assistant turns for transformers and belongs to an extension of Jinja.
_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")


_CURRENT_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


class ChatTemplateError(UserError, ValueError):
    """The tokenizer has no usable chat template, or not one for these settings."""


def template_variables(template: str | Mapping[str, str]) -> frozenset[str]:
    """The variables that a template reads from outside; for several templates, of all of them."""
    if not isinstance(template, str):
        return frozenset().union(*map(template_variables, template.values()))
    try:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(_GENERATION_TAG.sub("", template))
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"the chat template cannot be parsed: {error}") from None
    assigned = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    # A variable that is assigned as well is an argument only if the template asks for it first.
    optional = {
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name == "defined" and isinstance(test.node, nodes.Name)
    }
    given = {*environment.globals, "strftime_now", "raise_exception"}
    read = meta.find_undeclared_variables(tree) - given
    return frozenset(read - (assigned - optional))


def template_arguments(template: str | Mapping[str, str], settings: ChatSettings) -> dict[str, Any]:
    """The arguments for every rendering; ChatTemplateError if the template does not read one."""
    variables = template_variables(template)
    arguments = dict(settings.template_kwargs)
    for name in arguments:
        if name in _SET_BY_PROGRAM:
            raise ChatTemplateError(f"chat.template_kwargs: {name!r} is set by the program")
        if name not in variables:
            there = ", ".join(sorted(n for n in variables - _SET_BY_PROGRAM if "_token" not in n))
            raise ChatTemplateError(
                f"chat.template_kwargs: the chat template has no argument {name!r}; "
                f"it has {there or 'none'}"
            )
    if settings.thinking == "off":
        switch = next((name for name in THINKING_SWITCHES if name in variables), None)
        if switch is None:
            raise ChatTemplateError(
                "chat.thinking = 'off': the chat template has no argument that turns thinking off "
                f"({' or '.join(THINKING_SWITCHES)}); if the model does not think, leave it out"
            )
        if arguments.setdefault(switch, False) is not False:
            raise ChatTemplateError(
                f"chat.thinking = 'off' contradicts chat.template_kwargs, where {switch} is "
                f"{arguments[switch]!r}"
            )
    return arguments


def with_fixed_date(template: str) -> str:
    """The template with DATE in place of the current date."""
    return _CURRENT_DATE.sub(lambda call: repr(DATE.strftime(call[2])), template)
