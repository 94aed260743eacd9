"""Whether text becomes the token ids that the model was made for: the bundle's tokenizer, alone and beside another."""

from collections.abc import Callable, Sequence
from typing import Any

from wavekit.llm import LLM
from wavekit.verification.findings import Check
from wavekit.verification.prompts import SHIPPED
from wavekit_engines.errors import WavekitError

Encode = Callable[[str], list[int]]
EncodeChat = Callable[[Sequence[dict[str, Any]]], list[int] | None]

_CHAT = ({"role": "user", "content": "What is 17 times 23?"},)


def check_tokens(llm: LLM) -> list[Check]:
    """What can be seen of a bundle alone."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        return [Check("text", "tokenizer", "skipped", "the bundle has none")]
    bos = tokenizer.bos_token_id
    for what, ids in (("texts", llm.encode(SHIPPED[0][2])), ("chats", _chat(llm) or [])):
        if bos is not None and ids[:2] == [bos, bos]:
            return [Check("text", "tokenizer", "FAIL", _doubled(what, tokenizer.bos_token))]
        if ids and max(ids) >= llm.manifest.decoder.vocab_size:
            return [
                Check("text", "tokenizer", "FAIL", f"{what} get token {max(ids)}, beyond the model's vocabulary: "
                      "the tokenizer is another model's")
            ]  # fmt: skip
    changed = [text for _, _, text in SHIPPED if tokenizer.decode(llm.encode(text)).strip() != text.strip()]
    if changed:
        says = f"{changed[0][:30]!r} comes back from the tokenizer as another text; not every model can write it"
        return [Check("text", "tokenizer", "pass", says)]
    return [Check("text", "tokenizer", "pass", "texts come back as they were, and begin with one mark at most")]


def compare_tokens(llm: LLM, encode: Encode, encode_chat: EncodeChat) -> Check:
    """The bundle's token ids beside the checkpoint's."""
    if llm.tokenizer is None:
        return Check("checkpoint", "token ids", "skipped", "the bundle has no tokenizer")
    for _, _, text in SHIPPED:
        ours, theirs = llm.encode(text), encode(text)
        if ours != theirs:
            return Check("checkpoint", "token ids", "FAIL", _difference(llm, "text", ours, theirs))
    ours_chat, theirs_chat = _chat(llm), encode_chat(_CHAT)
    if ours_chat is not None and theirs_chat is not None and ours_chat != theirs_chat:
        return Check("checkpoint", "token ids", "FAIL", _difference(llm, "chat", ours_chat, theirs_chat))
    return Check(
        "checkpoint", "token ids", "pass", f"{len(SHIPPED)} texts and a chat become the checkpoint's token ids"
    )


def _chat(llm: LLM) -> list[int] | None:
    try:
        return llm.encode(_CHAT)
    except WavekitError:  # no chat template
        return None


def _difference(llm: LLM, what: str, ours: Sequence[int], theirs: Sequence[int]) -> str:
    assert llm.tokenizer is not None
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    bos = llm.tokenizer.bos_token_id
    if bos is not None and list(ours[:2]) == [bos, bos] != list(theirs[:2]):
        return _doubled(f"{what}s", llm.tokenizer.bos_token)
    return (
        f"a {what} becomes other token ids than in the checkpoint, from id {at + 1} on: {list(ours[at : at + 3])} "
        f"instead of {list(theirs[at : at + 3])}: the bundle has another tokenizer or other special tokens"
    )


def _doubled(what: str, token: str | None) -> str:
    return f"{what} begin with {token} twice: BOS added twice, by a template and by the tokenizer"
