"""Chat templates by name, for files that carry none or a wrong one, and the choice of a template.

The names are llama.cpp's. None writes BOS at the start: the tokenizer does, once. "llama2" is what
llama.cpp calls llama2-sys-bos. This module must not know how a template is rendered.
"""

from __future__ import annotations

import os
from pathlib import Path

from .chat import ChatTemplateError

# The same frame around every message, whoever speaks; %-filled below.
_UNIFORM = (
    "{%% for m in messages %%}{{ '%(before)s' + m.role + '%(role_end)s' + m.content%(strip)s"
    " + '%(after)s' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '%(before)sassistant%(role_end)s' }}{%% endif %%}"
)

# The system's content goes before the user's next content: for models that know no system message.
_MERGED = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' -%}{%- set ns.system = ns.system + m.content|trim + '\n\n' -%}"
)


def _uniform(before: str, role_end: str, after: str, strip: str = "") -> str:
    parts = {"before": before, "role_end": role_end, "after": after, "strip": strip}
    return _UNIFORM % {name: text.replace("\n", "\\n") for name, text in parts.items()}


def _merged(user: str, assistant: str, opening: str = "") -> str:
    """A template for models without system messages. user, assistant: Jinja expressions that write
    one message `m`; `text` in `user` is the user's content with the system's before it. opening:
    begins an answer.
    """
    return (
        f"{_MERGED}{{%- elif m.role == 'user' -%}}{{%- set text = ns.system + m.content -%}}"
        f"{{{{- {user} -}}}}{{%- set ns.system = '' -%}}"
        f"{{%- else -%}}{{{{- {assistant} -}}}}{{%- endif -%}}{{%- endfor -%}}"
        + (
            f"{{%- if add_generation_prompt -%}}{{{{- '{opening}' -}}}}{{%- endif -%}}"
            if opening
            else ""
        )
    )


BUILT_IN = {
    "chatml": _uniform("<|im_start|>", "\n", "<|im_end|>\n"),
    "llama3": _uniform("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "|trim"),
    "phi3": _uniform("<|", "|>\n", "<|end|>\n"),
    "phi4": _uniform("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "zephyr": _uniform("<|", "|>\n", "<|endoftext|>\n"),
    "gemma": _merged(
        r"'<start_of_turn>user\n' + text|trim + '<end_of_turn>\n'",
        r"'<start_of_turn>model\n' + m.content|trim + '<end_of_turn>\n'",
        r"<start_of_turn>model\n",
    ),
    "mistral-v1": _merged(
        "' [INST] ' + text + ' [/INST]'", "' ' + m.content + (eos_token or '</s>')"
    ),
    "mistral-v3": _merged(
        "'[INST] ' + text + '[/INST]'", "' ' + m.content|trim + (eos_token or '</s>')"
    ),
    "mistral-v7": (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ '[SYSTEM_PROMPT] ' + m.content + '[/SYSTEM_PROMPT]' }}"
        "{% elif m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
        "{% else %}{{ ' ' + m.content + (eos_token or '</s>') }}{% endif %}{% endfor %}"
    ),
    "llama2": (
        "{% set ns = namespace(before='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}"
        r"{% set ns.before = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
        "{% elif m.role == 'user' %}"
        "{{ '[INST] ' + ns.before + m.content + ' [/INST]' }}{% set ns.before = '' %}"
        "{% else %}{{ m.content + (eos_token or '</s>') }}"
        "{{ (bos_token or '<s>') if not loop.last }}{% endif %}{% endfor %}"
    ),
    "vicuna": (
        "{% for m in messages %}"
        r"{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
        r"{% elif m.role == 'user' %}{{ 'USER: ' + m.content + '\n' }}"
        r"{% else %}{{ 'ASSISTANT: ' + m.content + (eos_token or '</s>') + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "deepseek": (
        "{% for m in messages %}"
        "{% if m.role == 'system' %}{{ m.content }}"
        r"{% elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n' }}"
        r"{% else %}{{ '### Response:\n' + m.content + '\n<|EOT|>\n' }}{% endif %}"
        r"{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
    ),
}


def choose(choice: str) -> str:
    """The template that a user means by a name, by a file, or by Jinja itself."""
    if choice in BUILT_IN:
        return BUILT_IN[choice]
    if "{{" in choice or "{%" in choice:
        return choice
    if os.path.isfile(choice):
        return _read(Path(choice))
    known = ", ".join(sorted(BUILT_IN))
    raise ChatTemplateError(f"{choice!r} is no file, no Jinja, and none of the names: {known}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ChatTemplateError(f"{path} cannot be read: {error}") from None
