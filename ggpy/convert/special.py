"""Special tokens of a checkpoint as metadata: their ids, which of them surround text, and the
chat templates.

The places are those of llama.cpp's converter: tokenizer_config.json, by the texts of added tokens,
then config.json; the post-processor of tokenizer.json says whether BOS is put before a text.
Templates are copied and not rendered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..tokenizer import Tokenizer
from ..tokenizer.special import END_TEXTS
from ..util.messages import shown
from .folder import ConvertError, Folder
from .pretokenizer import PROBES
from .vocabulary import CONFIG, JSON, JSON_LIMIT, Tokens, added_entries, steps_of

Metadata = dict[str, tuple[str, Any]]

NAMES = {  # the hub's name -> GGUF's, with its misspelling
    **{"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding"},
    **{"cls": "cls", "mask": "mask"},
}
ENDS_TURN = "<|eot|>"
GENERATION = "generation_config.json"
TEMPLATE, OLD_TEMPLATE = "chat_template.jinja", "chat_template.json"


def special_metadata(
    folder: Folder, config: dict[str, Any], tokens: Tokens, warnings: list[str]
) -> Metadata:
    """Ids, add_bos_token and add_eos_token, templates."""
    content = folder.json(JSON, JSON_LIMIT) or {}
    settings = folder.json(CONFIG) or {}
    ids = _ids(folder, content, settings, config, tokens)
    ids = _with_ends(_with_last(ids, content, tokens), folder, config, tokens)
    found: Metadata = {}
    for name, id in ids.items():
        if id < len(tokens.texts):
            found[f"tokenizer.ggml.{NAMES.get(name, name)}_token_id"] = ("u32", id)
        else:
            warnings.append(f"{name} token {id} is outside the vocabulary: left out")
    added = {"bos": None, "eos": None, **_processed(content, settings, ids, tokens)}
    for name, value in added.items():
        if value is None:
            value = settings.get(f"add_{name}_token")
        if value is None and tokens.model == "gpt2":
            value = False  # some pre-tokenizers of GGUF would add a BOS
        if tokens.model == "gemma4" and name == "bos":
            value = True
        if isinstance(value, bool):
            found[f"tokenizer.ggml.add_{name}_token"] = ("bool", value and name in ids)
    return {**found, **_suppressed(folder, tokens), **_templates(folder, settings)}


def _ids(
    folder: Folder,
    content: dict[str, Any],
    settings: dict[str, Any],
    config: dict[str, Any],
    tokens: Tokens,
) -> dict[str, int]:
    entries = added_entries(content.get("added_tokens") or [], folder.path / JSON)
    by_text = {text: id for id, text, _ in entries}
    found = {}
    for name in NAMES:
        entry = settings.get(f"{name}_token")
        text = entry.get("content") if isinstance(entry, dict) else entry
        id = by_text.get(text) if isinstance(text, str) else None
        if id is None:
            id = config.get(f"{name}_token_id")
        if id is None:
            id = tokens.named.get(name)
        if type(id) is int and id >= 0:
            found[name] = id
    if config.get("model_type") == "hunyuan_v1_dense":
        end = config.get("eod_token_id")
        if type(end) is int and end >= 0:
            found["eos"] = end
    if config.get("model_type") == "muse_glimmer" and ENDS_TURN in by_text:
        found["eot"] = by_text[ENDS_TURN]  # no setting of the checkpoint names it
    return found


def _with_last(ids: dict[str, int], content: dict[str, Any], tokens: Tokens) -> dict[str, int]:
    """EOS of a file is the token that the post-processor puts after a text; if the checkpoint has
    another EOS, that one becomes EOT.
    """
    text = _around(content)[1]
    if text is None or text not in tokens.texts or "eos" not in ids:
        return ids
    id = tokens.texts.index(text)
    return ids if id == ids["eos"] else {**ids, "eos": id, "eot": ids["eos"]}


def _with_ends(
    ids: dict[str, int], folder: Folder, config: dict[str, Any], tokens: Tokens
) -> dict[str, int]:
    """`ids`, with up to two more tokens that end an answer as EOT and EOM.

    Tokens that a tokenizer knows by their texts (END_TEXTS) need no key. GLM's are not among these:
    they are the tokens that begin the next turn.
    """
    settings = (folder.json(GENERATION), config, config.get("text_config"))
    lists = [x.get("eos_token_id") for x in settings if isinstance(x, dict)]
    known = {*ids.values(), *(i for i, text in enumerate(tokens.texts) if text in END_TEXTS)}
    others = [id for ends in lists if isinstance(ends, list) for id in ends if type(id) is int]
    others = [id for id in dict.fromkeys(others) if 0 <= id < len(tokens.texts) and id not in known]
    free = [name for name in ("eot", "eom") if name not in ids]
    return {**ids, **dict(zip(free, others, strict=False))}


def _suppressed(folder: Folder, tokens: Tokens) -> Metadata:
    """The tokens that no answer may have: Gemma 4's that close an image or a sound."""
    ids = (folder.json(GENERATION) or {}).get("suppress_tokens")
    ids = ids if isinstance(ids, list) else []
    found = [id for id in dict.fromkeys(ids) if type(id) is int and 0 <= id < len(tokens.texts)]
    return {"tokenizer.ggml.suppress_tokens": ("arr[i32]", found)} if found else {}


def _around(content: dict[str, Any]) -> tuple[str | None, str | None]:
    """The special tokens that the post-processor puts before a text and after it."""
    first = last = None
    for step in steps_of(content.get("post_processor"), "processors"):
        single = step.get("single") if step.get("type") == "TemplateProcessing" else None
        if isinstance(single, list) and len(single) > 1:
            first, last = _special_text(single[0]) or first, _special_text(single[-1]) or last
    return first, last


def _processed(
    content: dict[str, Any], settings: dict[str, Any], ids: dict[str, int], tokens: Tokens
) -> dict[str, bool]:
    """Whether the post-processor puts BOS before a text and EOS after it; {} if it does not say."""
    found: dict[str, bool] = {}
    for step in steps_of(content.get("post_processor"), "processors"):
        if step.get("type") == "ByteLevel":
            found = {"bos": False, "eos": False, **found}
    for name, text in zip(("bos", "eos"), _around(content), strict=True):
        if text is not None:
            found[name] = name in ids and tokens.texts[ids[name]] == text
    return found


def _special_text(step: Any) -> str | None:
    inner = step.get("SpecialToken") if isinstance(step, dict) else None
    return inner.get("id") if isinstance(inner, dict) else None


def _templates(folder: Folder, settings: dict[str, Any]) -> Metadata:
    """The chat template, and other templates by name where there are some."""
    template = settings.get("chat_template")
    if template is None:
        template = folder.text(TEMPLATE)
    if template is None:
        template = (folder.json(OLD_TEMPLATE) or {}).get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": ("str", template)} if template else {}
    if template is None:
        return {}
    if not isinstance(template, list):
        raise ConvertError(f"{folder.path / CONFIG}: chat_template is no text")
    return _named(dict(_named_templates(template, folder)))


def _named(by_name: dict[str, str]) -> Metadata:
    found: Metadata = {}
    others = [name for name in by_name if name != "default"]
    if others:
        found["tokenizer.chat_templates"] = ("arr[str]", others)
    for name in others:
        found[f"tokenizer.chat_template.{name}"] = ("str", by_name[name])
    if "default" in by_name:
        found["tokenizer.chat_template"] = ("str", by_name["default"])
    return found


def _named_templates(entries: list[Any], folder: Folder) -> Iterator[tuple[str, str]]:
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {}
        name, text = entry.get("name"), entry.get("template")
        if not isinstance(name, str) or not isinstance(text, str):
            raise ConvertError(f"{folder.path / CONFIG}: {shown(entry)} is no chat template")
        yield "".join(c if c.isascii() and (c.isalnum()) else "_" for c in name), text


def verify(metadata: dict[str, tuple[str, Any]], tokens: Tokens, warnings: list[str]) -> None:
    """Compares the ids of a few texts with those of the checkpoint's own tokenizer.

    The first text whose ids differ becomes a warning, not an error: the model may still be of use.
    GGUFError if `metadata` has no tokenizer.
    """
    tokenizer = Tokenizer({key: value for key, (_, value) in metadata.items()})
    warnings += tokenizer.warnings
    if tokens.encode is None:
        return
    for text in PROBES:
        theirs = tokens.encode(text)
        ours = tokenizer.encode(text, add_special=False)
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            warnings.append(
                f"ids of {text[:30]!r} differ from those of the checkpoint's own tokenizer,"
                f" from number {at + 1} of {len(theirs)} on"
            )
            return
