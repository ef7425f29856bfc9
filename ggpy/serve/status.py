"""What the server says about its model and its state: /v1/models, /props and /slots.

The forms are llama-server's. Nothing here knows HTTP.
"""

from __future__ import annotations

from typing import Any

from ..bench.limits import n_weights
from ..runtime.sequence import Sequence
from ..util.messages import utf8
from ..util.paths import version
from .api.generation_settings import sampling_of, settings_of
from .events import AnswerOptions
from .service import ModelService
from .settings import ServerSettings

# llama.cpp's numbers of the kinds of tokenizers.
VOCAB_TYPES = {"llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5}


def models(service: ModelService) -> dict[str, Any]:
    """The answer of /v1/models."""
    model = service.model
    meta = {
        "vocab_type": VOCAB_TYPES.get(str(model.metadata.get("tokenizer.ggml.model")), 0),
        "n_vocab": service.tokenizer.n_vocab,
        "n_ctx": service.engine.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.decoder.sizes.n_embd,
        "n_params": n_weights(model.file.tensors.values()),
        "size": model.file.nbytes,
    }
    found = {
        "id": service.model_name,
        "aliases": list(service.settings.aliases) or [service.model_name],
        "tags": list(service.settings.tags),
        "object": "model",
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "created": service.created,
        "owned_by": "ggpy",
        "meta": meta,
    }
    return {"models": [_as_ollama(service)], "object": "list", "data": [found]}


def _as_ollama(service: ModelService) -> dict[str, Any]:
    """The model in Ollama's form, which llama-server's list has besides."""
    name = service.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def props(service: ModelService, settings: ServerSettings) -> dict[str, Any]:
    """The answer of /props, in llama-server's form."""
    tokenizer = service.tokenizer
    bos, eos = (
        "" if id is None else tokenizer.text(id) for id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    options = AnswerOptions(settings.sampling, settings.max_tokens)
    params = {**settings_of(options), "stream": True, "timings_per_token": False}
    reasoning, tools = service.format.has_reasoning, service.format.name != "content"
    return {
        "default_generation_settings": {
            **_slot(0, service),
            "is_processing": False,
            "params": params,
        },
        "total_slots": service.engine.n_seq,
        "model_alias": service.model_name,
        "model_path": utf8(service.model.file.path.name),
        "modalities": {"vision": False, "audio": False, "video": False},
        "endpoint_slots": settings.slots,
        "endpoint_props": False,
        "endpoint_metrics": settings.metrics,
        "ui": settings.with_ui,
        "chat_template": service.template or "",
        "chat_template_caps": {
            "supports_string_content": True,
            "supports_typed_content": False,
            "supports_object_arguments": True,
            "supports_system_role": service.takes_system,
            "supports_tools": tools,
            "supports_tool_calls": tools,
            "supports_parallel_tool_calls": tools,
            "supports_reasoning": reasoning,
            "supports_preserve_reasoning": "reasoning_content" in (service.template or ""),
            "supports_reasoning_effort": "reasoning_effort" in (service.template or ""),
        },
        "bos_token": bos,
        "eos_token": eos,
        "build_info": f"ggpy {version()}",
        "is_sleeping": False,
    }


def slots(service: ModelService) -> list[dict[str, Any]]:
    """The answer of /slots: the sequences that run or wait, and places that are free."""
    running = [ticket.sequence for ticket in service.worker.tickets]
    found = [_running(i, s, service) for i, s in enumerate(running)]
    idle = range(len(found), service.engine.n_seq)
    return [*found, *({**_slot(i, service), "is_processing": False} for i in idle)]


def _slot(i: int, service: ModelService) -> dict[str, Any]:
    """What is said of any slot."""
    return {"id": i, "id_task": -1, "n_ctx": service.engine.n_ctx, "speculative": False}


def _running(i: int, s: Sequence, service: ModelService) -> dict[str, Any]:
    n = -1 if s.max_tokens is None else s.max_tokens
    left = -1 if n < 0 else n - s.n_generated
    following = {"has_next_token": True, "n_remain": left, "n_decoded": s.n_generated}
    return {
        **_slot(i, service),
        "is_processing": True,
        "n_prompt_tokens": s.n_prompt,
        "n_prompt_tokens_processed": max(0, min(s.n_evaluated, s.n_prompt) - s.n_reused),
        "n_prompt_tokens_cache": s.n_reused,
        "n_decoded": s.n_generated,
        "params": {**sampling_of(s.sampler.params), "n_predict": n, "max_tokens": n},
        "next_token": [following],
    }
