"""Texts piece by piece, and rows that nobody wants any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
import torch
import trio
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from batched.generation import TextGenerator
from language_models import model, tokenizer

pytestmark = pytest.mark.model

PROMPT = "the quick brown fox"
LONG: dict[str, Any] = {"max_new_tokens": 40, "min_new_tokens": 40}


@contextmanager
def watched(look: Callable[[int, int], None]) -> Iterator[list[int]]:
    """The sizes of the batches that the model sees; `look` gets the number of each, and its
    size.
    """
    sizes: list[int] = []

    def note(_: Any, __: Any, inputs: dict[str, Any]) -> None:
        sizes.append(len(inputs["input_ids"]))
        look(len(sizes), sizes[-1])

    handle = model().register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield sizes
    finally:
        handle.remove()


def together(count: int, **settings: Any) -> TextGenerator[str]:
    """A generator that begins as soon as so many prompts are there."""
    return TextGenerator(
        model(), tokenizer(), batch_size=count, flush="window", timeout_ms=60_000, **settings
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"stop_strings": "e "},
        {"stop_strings": ["qu", "og, a", "\N{REPLACEMENT CHARACTER}"]},
        {"temperature": 3.0, "seed": 5},
        {"max_new_tokens": 1},
    ],
    ids=str,
)
def test_the_pieces_are_the_text(settings: dict[str, Any]) -> None:
    async def pieces(generator: TextGenerator[str], prompt: str) -> list[str]:
        return [piece async for piece in generator.stream(prompt, **settings)]

    async def main(generator: TextGenerator[str]) -> list[list[str]]:
        prompts = [PROMPT[:end] for end in range(1, 9)]
        return await asyncio.gather(*(pieces(generator, prompt) for prompt in prompts))

    with TextGenerator(model(), tokenizer(), max_new_tokens=40) as generator:
        found = asyncio.run(main(generator))
        for end, each in enumerate(found, 1):
            assert "".join(each) == generator(PROMPT[:end], **settings)
            assert all(each)
        if settings == {}:
            assert "".join(trio.run(pieces, generator, PROMPT[:3])) == "".join(found[2])


def test_a_character_comes_whole_though_its_tokens_come_one_by_one() -> None:
    ids = tokenizer()("\N{PILE OF POO}")["input_ids"]
    assert len(ids) == 4
    first_came = threading.Event()

    def spell(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        done = tokens.shape[1] - 1
        if done == 6:  # in the midst of the second character
            assert first_came.wait(30)
        scores[:] = -torch.inf
        scores[0, ids[done % 4]] = 0
        return scores

    async def main() -> list[str]:
        pieces: list[str] = []
        with TextGenerator(model(), tokenizer(), max_new_tokens=8) as generator:
            async for piece in generator.stream([5], logits_processor=[spell]):
                pieces.append(piece)
                first_came.set()
        return pieces

    assert asyncio.run(main()) == ["\N{PILE OF POO}"] * 2


def byte_tokenizer() -> Any:
    """Decodes as those of SentencePiece do: bytes that are next to each other are one string."""
    names = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a"]
    made = Tokenizer(
        BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True)
    )
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def spelled(given: bytes) -> dict[str, Any]:
    """Settings with which `byte_tokenizer` and a prompt of one token lead to these bytes."""

    def spell(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:] = -torch.inf
        scores[0, 3 + given[tokens.shape[1] - 1]] = 0
        return scores

    return {"logits_processor": [spell], "max_new_tokens": len(given)}


def test_a_stop_string_is_seen_behind_characters_of_many_bytes() -> None:
    settings = spelled("\N{PILE OF POO}\N{EURO SIGN}\n\N{EURO SIGN}\N{EURO SIGN}".encode())
    with TextGenerator(model(), byte_tokenizer(), details=True) as generator:
        found = generator([5], stop_strings="\n", **settings)
    assert found.text == "\N{PILE OF POO}\N{EURO SIGN}"
    assert (len(found.tokens), found.finish_reason) == (8, "stop")


def test_a_byte_is_held_back_until_what_follows_cannot_change_it() -> None:
    settings = spelled("\N{PILE OF POO}".encode() + b"\xf0\x9f")  # the second one breaks off

    async def main() -> None:
        with TextGenerator(model(), byte_tokenizer()) as generator:
            pieces = [piece async for piece in generator.stream([5], **settings)]
            assert "".join(pieces) == await generator.acall([5], **settings)

    asyncio.run(main())


def test_one_that_stops_listening_leaves_the_batch_and_the_others_go_on() -> None:
    left = threading.Event()

    def look(step: int, size: int) -> None:
        if step == 4:
            assert left.wait(30)

    async def leave(generator: TextGenerator[str]) -> None:
        stream = generator.stream(PROMPT, **LONG)
        await anext(stream)
        await stream.aclose()
        left.set()

    async def main(generator: TextGenerator[str]) -> Any:
        others = [generator.acall(PROMPT[:end], **LONG) for end in (3, 5)]
        return await asyncio.gather(leave(generator), *others)

    with watched(look) as sizes, together(3) as generator:
        texts = asyncio.run(main(generator))[1:]
    assert sizes[0] == 3
    assert sizes[4:] == [2] * 36
    with TextGenerator(model(), tokenizer()) as generator:
        assert texts == [generator(PROMPT[:end], **LONG) for end in (3, 5)]


def test_a_call_that_is_cancelled_leaves_the_batch() -> None:
    begun, left = threading.Event(), threading.Event()

    def look(step: int, size: int) -> None:
        if step == 2:
            begun.set()
            assert left.wait(30)

    async def main(generator: TextGenerator[str]) -> str:
        leaving = asyncio.create_task(generator.acall([PROMPT, PROMPT], **LONG))
        staying = asyncio.create_task(generator.acall(PROMPT, **LONG))
        await asyncio.to_thread(begun.wait, 30)
        leaving.cancel()
        await asyncio.wait([leaving])
        left.set()
        return await staying

    with watched(look) as sizes, together(3) as generator:
        text = asyncio.run(main(generator))
    assert (sizes[:2], sizes[2:]) == ([3, 3], [1] * 38)
    with TextGenerator(model(), tokenizer()) as generator:
        assert text == generator(PROMPT, **LONG)


def test_a_batch_that_runs_out_of_memory_repeats_no_piece() -> None:
    def look(step: int, size: int) -> None:
        if step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    async def main(generator: TextGenerator[str]) -> Any:
        async def whole(prompt: str) -> str:
            return "".join([piece async for piece in generator.stream(prompt, seed=7, **LONG)])

        return await asyncio.gather(*(whole(PROMPT[:end]) for end in (3, 4, 5, 6)))

    with watched(look) as sizes, together(4, temperature=1.0) as generator:
        texts = asyncio.run(main(generator))
    assert sizes[:4] == [4, 4, 4, 2]
    with TextGenerator(model(), tokenizer(), temperature=1.0, **LONG) as generator:
        assert texts == [generator(PROMPT[:end], seed=7) for end in (3, 4, 5, 6)]


def test_a_text_that_has_ended_does_not_wait_for_longer_ones() -> None:
    answered: dict[int, threading.Event] = {limit: threading.Event() for limit in (3, 5, 7)}
    prompts = {3: "the", 5: "quick", 7: "fox"}

    def look(step: int, size: int) -> None:
        for limit, event in answered.items():
            if step > limit:
                assert event.wait(30)

    async def streamed(generator: TextGenerator[str]) -> str:
        pieces = generator.stream(prompts[5], max_new_tokens=5, min_new_tokens=5)
        text = "".join([piece async for piece in pieces])
        answered[5].set()
        return text

    with watched(look) as sizes, together(4) as generator:
        future = generator.submit(prompts[3], max_new_tokens=3, min_new_tokens=3)
        future.add_done_callback(lambda _: answered[3].set())
        found: list[str] = []

        def call() -> None:
            found.append(generator(prompts[7], max_new_tokens=7, min_new_tokens=7))
            answered[7].set()

        threads = [
            threading.Thread(target=call),
            threading.Thread(target=lambda: found.append(generator(PROMPT, **LONG))),
        ]
        for thread in threads:
            thread.start()
        text = asyncio.run(streamed(generator))
        for thread in threads:
            thread.join(30)
    assert sizes == [4] * 3 + [3] * 2 + [2] * 2 + [1] * 33
    with TextGenerator(model(), tokenizer()) as alone:
        limits = [{"max_new_tokens": limit, "min_new_tokens": limit} for limit in (3, 5, 7)]
        short = [alone(prompt, **of) for prompt, of in zip(prompts.values(), limits, strict=True)]
        assert [future.result(), text, *found] == [*short, alone(PROMPT, **LONG)]


def test_an_error_of_the_model_ends_the_stream() -> None:
    def look(step: int, size: int) -> None:
        if step == 3:
            raise ValueError("broken")

    async def main(generator: TextGenerator[str]) -> None:
        async for _ in generator.stream(PROMPT, **LONG):
            pass

    with watched(look), together(1) as generator, pytest.raises(ValueError, match="broken"):
        asyncio.run(main(generator))
