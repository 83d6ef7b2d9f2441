"""Shown: the content of a chat's messages: text, and pictures where the model sees.

Parts of a message are joined as they come; a mark stands for a picture until the prompt is in tokens. A
request shows at most one picture.
"""

import asyncio
from collections.abc import Sequence

from tessera.serve.openai_errors import ApiError
from tessera.serve.openai_ports import Eyes
from tessera.serve.records import Picture
from tessera.serve.schemas import Message, Part

UNKNOWN = "\ufffd"


class Shown:
    """What one request shows."""

    def __init__(self, eyes: Eyes | None) -> None:
        self._eyes = eyes
        self._urls: list[str] = []

    def content(self, message: Message, number: int) -> str:
        """A message's text, with a mark for its picture."""
        if message.content is None:
            raise ApiError(400, f"messages.{number}: content is missing", "messages", "missing")
        if isinstance(message.content, str):
            return self._plain(message.content)
        return "".join(self._part(part, number) for part in message.content)

    def _plain(self, text: str) -> str:
        """Nobody but this class writes a mark."""
        return text if self._eyes is None else text.replace(self._eyes.mark, UNKNOWN)

    def _part(self, part: Part, number: int) -> str:
        if part.type == "text" and part.text is not None:
            return self._plain(part.text)
        if part.type != "image_url" or self._eyes is None:
            reads = "text" if self._eyes is None else "text and image_url"
            text = (
                f"messages.{number}: a part of type '{part.type}' is not supported; this model reads {reads}"
            )
            raise ApiError(400, text, "messages", "unsupported_value")
        found = (part.model_extra or {}).get("image_url")
        url = found.get("url") if isinstance(found, dict) else found
        if not isinstance(url, str):
            text = f'messages.{number}: image_url is {{"url": "data:image/png;base64,..."}}'
            raise ApiError(400, text, "messages", "invalid_value")
        if self._urls:
            text = f"messages.{number}: a request shows one picture at most"
            raise ApiError(400, text, "messages", "unsupported_value")
        self._urls.append(url)
        return self._eyes.mark

    async def placed(self, prompt: Sequence[int]) -> tuple[Sequence[int], Picture | None]:
        """The prompt with its picture, which is looked at beside the event loop."""
        if self._eyes is None or not self._urls:
            return prompt, None
        return self._eyes.placed(prompt, await asyncio.to_thread(self._eyes.look, self._urls[0]))
