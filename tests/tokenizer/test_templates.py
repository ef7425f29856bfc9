"""Templates by name: their prompts are llama.cpp's, and --chat-template finds the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggpy.tokenizer.chat import ChatTemplateError, render
from ggpy.tokenizer.templates import BUILT_IN, choose

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "it's "},
    {"role": "assistant", "content": "so"},
    {"role": "user", "content": "bye"},
]
# As llama_chat_apply_template writes TALK, without a BOS at the start.
PROMPTS = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nit's <|im_end|>\n"
        "<|im_start|>assistant\nso<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "llama3": (
        "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nit's<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nso<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nbye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nit's <|end|>\n<|assistant|>\nso<|end|>\n"
        "<|user|>\nbye<|end|>\n<|assistant|>\n"
    ),
    "phi4": (
        "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>it's <|im_end|>"
        "<|im_start|>assistant<|im_sep|>so<|im_end|><|im_start|>user<|im_sep|>bye<|im_end|>"
        "<|im_start|>assistant<|im_sep|>"
    ),
    "zephyr": (
        "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nit's <|endoftext|>\n"
        "<|assistant|>\nso<|endoftext|>\n<|user|>\nbye<|endoftext|>\n<|assistant|>\n"
    ),
    "gemma": (
        "<start_of_turn>user\nBe brief.\n\nit's<end_of_turn>\n"
        "<start_of_turn>model\nso<end_of_turn>\n"
        "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral-v1": " [INST] Be brief.\n\nit's  [/INST] so</s> [INST] bye [/INST]",
    "mistral-v3": "[INST] Be brief.\n\nit's [/INST] so</s>[INST] bye[/INST]",
    "mistral-v7": (
        "[SYSTEM_PROMPT] Be brief.[/SYSTEM_PROMPT][INST] it's [/INST] so</s>[INST] bye[/INST]"
    ),
    "llama2": "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nit's  [/INST]so</s><s>[INST] bye [/INST]",
    "vicuna": "Be brief.\n\nUSER: it's \nASSISTANT: so</s>\nUSER: bye\nASSISTANT:",
    "deepseek": (
        "Be brief.### Instruction:\nit's \n### Response:\nso\n<|EOT|>\n"
        "### Instruction:\nbye\n### Response:\n"
    ),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_prompts_are_llama_cpps(name: str) -> None:
    assert render(BUILT_IN[name], TALK, bos="<s>", eos="</s>") == PROMPTS[name]


@pytest.mark.parametrize("name", ["chatml", "gemma", "vicuna"])
def test_without_opening_an_answer(name: str) -> None:
    whole = render(BUILT_IN[name], TALK)
    shut = render(BUILT_IN[name], TALK, add_generation_prompt=False)
    assert whole.startswith(shut) and len(shut) < len(whole)


def test_choices_are_names_files_and_jinja(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ 'caf\u00e9' }}", encoding="utf-8")
    assert choose("gemma") == BUILT_IN["gemma"]
    assert choose(str(path)) == "{{ 'caf\u00e9' }}"
    assert choose("{{ bos_token }}x") == "{{ bos_token }}x"


def test_other_choices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match=r"'gemmma' is no file.*chatml, deepseek, gemma"):
        choose("gemmma")
    binary = tmp_path / "template.bin"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ChatTemplateError, match=r"template\.bin cannot be read"):
        choose(str(binary))
