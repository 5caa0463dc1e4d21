"""Texts in pieces."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import trio
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from batched._generation.text import Pieces, TextDecoder
from batched.generation import TextGenerator
from language_models import model, tokenizer

pytestmark = pytest.mark.model

PROMPT = "the quick brown fox"


def test_the_joined_pieces_are_the_text() -> None:
    each: list[dict[str, Any]] = [
        {},
        {"stop_strings": "e "},
        {"stop_strings": ["qu", "og, a", "\N{REPLACEMENT CHARACTER}"]},
        {"temperature": 3.0, "seed": 5},
        {"max_new_tokens": 1},
    ]
    asked = [(PROMPT[:end], settings) for settings in each for end in (1, 3, 8)]

    async def pieces(prompt: str, settings: dict[str, Any]) -> list[str]:
        return [piece async for piece in generator.stream(prompt, **settings)]

    async def main() -> list[list[str]]:
        return await asyncio.gather(*(pieces(*call) for call in asked))

    with TextGenerator(model(), tokenizer(), max_new_tokens=30) as generator:
        found = asyncio.run(main())
        assert all(all(text) for text in found)
        texts = ["".join(text) for text in found]
        assert texts == [generator(prompt, **settings) for prompt, settings in asked]
        assert "".join(trio.run(pieces, PROMPT[:3], {})) == texts[1]


def written(tokens: list[int]) -> dict[str, Any]:
    """Return settings with which a prompt of one token leads to these tokens."""

    def write(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:] = -torch.inf
        scores[0, tokens[ids.shape[1] - 1]] = 0
        return scores

    return {"logits_processor": [write], "max_new_tokens": len(tokens)}


def byte_tokenizer() -> Any:
    """Return a tokenizer that joins bytes, as SentencePiece does: the token of byte n is n + 3."""
    names = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    made = Tokenizer(
        BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def test_a_stop_string_is_found_behind_characters_of_many_bytes() -> None:
    text = "\N{PILE OF POO}\N{EURO SIGN}\n\N{EURO SIGN}\N{EURO SIGN}"
    settings = written([3 + byte for byte in text.encode()])
    with TextGenerator(model(), byte_tokenizer(), details=True) as generator:
        found = generator([5], stop_strings="\n", **settings)
    assert found.text == "\N{PILE OF POO}\N{EURO SIGN}"
    assert (len(found.tokens), found.finish_reason) == (8, "stop")


def test_a_byte_is_held_back_until_no_later_byte_can_change_it() -> None:
    text = "\N{PILE OF POO}".encode() + b"\xf0\x9f"  # the second one breaks off
    settings = written([3 + byte for byte in text])
    with TextGenerator(model(), byte_tokenizer()) as generator:
        assert "".join(generator.stream([5], **settings)) == generator([5], **settings)


def trained(kind: str) -> Any:
    """Return a tokenizer whose first three tokens are special."""
    if kind == "bytes":
        return tokenizer()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    options: dict[str, Any] = {"special_tokens": [*special.values()], "show_progress": False}
    if kind == "sentencepiece":
        made = Tokenizer(BPE())
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        fused = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        made.decoder = decoders.Sequence(fused)
    else:
        options["end_of_word_suffix"] = "</w>"
        made = Tokenizer(BPE(end_of_word_suffix="</w>"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.BPEDecoder("</w>")
    made.train_from_iterator(
        ["the quick brown fox, don't: 0123 Gr\xf6\xdfe \u65e5\u672c"] * 3,
        trainers.BpeTrainer(vocab_size=150, **options),
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "ends of words"])
def test_special_tokens_cost_a_stream_no_character(kind: str) -> None:
    made = trained(kind)
    decoder, draw = TextDecoder(made), random.Random(kind)
    assert decoder.special == {0, 1, 2}
    for _ in range(400):
        pieces = Pieces(decoder, [])
        count = draw.randint(1, 30)
        tokens = [draw.randrange(3 if draw.random() < 0.2 else len(made)) for _ in range(count)]
        plain: list[int] = []
        joined = ""
        for token in tokens:
            if token not in decoder.special:
                plain.append(token)
            joined += pieces.next(plain)
        text = made.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        rest = text[len(joined) :]
        assert joined + rest == text
        assert not rest or "\N{REPLACEMENT CHARACTER}" in rest  # a character has not ended


def test_a_stop_string_is_found_around_a_special_token() -> None:
    made = tokenizer()
    first, second = (made(text)["input_ids"] for text in ("the qu", "ick brown"))
    settings = written([*first, 2, *second])
    with TextGenerator(model(), made, details=True) as generator:
        found = generator([5], stop_strings="quick", **settings)
        assert (found.text, found.finish_reason) == ("the ", "stop")
        whole = generator([5], **settings)
        assert whole.text == "the quick brown"
        assert "".join(generator.stream([5], **settings)) == whole.text
        ended = generator([5], stop_strings="<|end|>", **settings)
        assert (ended.text, ended.finish_reason) == ("the qu", "stop")
