"""What the server says about its model and its state: /v1/models, /props and /slots.

The forms are llama-server's. Nothing here knows HTTP.
"""

from __future__ import annotations

from typing import Any

from ..bench.limits import n_weights
from ..util.paths import version
from .api.options import NAMES
from .service import ModelService


def models(service: ModelService) -> dict[str, Any]:
    """The answer of /v1/models."""
    model = service.model
    meta = {
        "n_vocab": service.tokenizer.n_vocab,
        "n_ctx": service.engine.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.decoder.sizes.n_embd,
        "n_params": n_weights(model.file.tensors.values()),
        "size": model.file.nbytes,
    }
    found = {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "ggpy",
        "meta": meta,
    }
    return {"object": "list", "data": [found]}


def props(service: ModelService) -> dict[str, Any]:
    """The answer of /props, in llama-server's form."""
    tokenizer = service.tokenizer
    bos, eos = (
        "" if id is None else tokenizer.text(id) for id in (tokenizer.bos_id, tokenizer.eos_id)
    )
    params = {name: getattr(service.settings.sampling, name) for name in NAMES}
    return {
        "default_generation_settings": {"n_ctx": service.engine.n_ctx, "params": params},
        "total_slots": service.engine.n_seq,
        "model_alias": service.model_name,
        "model_path": service.model.file.path.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": service.template or "",
        "chat_template_caps": {
            "supports_system_role": service.takes_system,
            "supports_tools": service.format.name != "content",
            "supports_reasoning": service.format.has_reasoning,
        },
        "bos_token": bos,
        "eos_token": eos,
        "build_info": f"ggpy {version()}",
        "is_sleeping": False,
    }


def slots(service: ModelService) -> list[dict[str, Any]]:
    """The answer of /slots: the sequences that run or wait, and places that are free."""
    running = [ticket.sequence for ticket in service.worker.tickets]
    found = [
        {
            "id": i,
            "n_ctx": service.engine.n_ctx,
            "is_processing": True,
            "n_prompt_tokens": s.n_prompt,
            "n_prompt_tokens_cache": s.n_reused,
            "n_decoded": s.n_generated,
        }
        for i, s in enumerate(running)
    ]
    idle = {"n_ctx": service.engine.n_ctx, "is_processing": False}
    return [*found, *({"id": i, **idle} for i in range(len(found), service.engine.n_seq))]
