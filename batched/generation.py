"""Text generation as a batched function: `TextGenerator`; needs the extra `generation`."""

from ._generation.generator import TextGenerator
from ._generation.result import Generation
from ._services.prompts import Message, Prompt

__all__ = ["Generation", "Message", "Prompt", "TextGenerator"]
