"""The plain way to serve a model: FastAPI, and Hugging Face's `generate` in worker threads, one a request.

    python benchmarks/serve_plain.py --port 8100 [--workers 2] [--threads 1]

What `bench_serve.py` compares with; it has the weights and the bytes-as-tokens of `tessera serve tiny-llama`.
Written to be fair: requests wait in a queue and not in a crowd of threads, tokens go to the event loop one by
one as they are made, and nothing is done between them but text and JSON. Batching is what it lacks.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from transformers.generation.streamers import BaseStreamer

from tessera.capture.models import catalog
from tessera.serve.text import ByteText

CAPACITY = 512


def make_model(name: str) -> Any:
    """The model that `tessera serve` builds under this name, in its library's own form."""
    family, sizes, dtype = catalog.LANGUAGE[name]
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Tokens(BaseStreamer):  # type: ignore[misc]
    """Hands every new token to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._is_prompt = loop, True
        self.waiting: asyncio.Queue[int | None] = asyncio.Queue()

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`, with the prompt first."""
        if not self._is_prompt:
            self._loop.call_soon_threadsafe(self.waiting.put_nowait, int(value))
        self._is_prompt = False

    def end(self) -> None:
        """Called by `generate`."""
        self._loop.call_soon_threadsafe(self.waiting.put_nowait, None)


def make_app(model: Any, name: str, num_workers: int) -> FastAPI:
    """Two routes."""
    app, text, pool = FastAPI(), ByteText(), ThreadPoolExecutor(num_workers)

    def generate(prompt: list[int], asked: dict[str, Any], tokens: Tokens) -> None:
        end = None if asked.get("ignore_eos") else text.end[0]
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked["max_tokens"],
                do_sample=False,
                eos_token_id=end,
                pad_token_id=0,
                streamer=tokens,
            )

    async def stream(asked: dict[str, Any]) -> AsyncIterator[str]:
        loop, prompt = asyncio.get_running_loop(), text.encode(asked["prompt"])
        tokens, reader, num = Tokens(loop), text.reader(), 0
        loop.run_in_executor(pool, generate, prompt, asked, tokens)
        while (token := await tokens.waiting.get()) is not None:
            num += 1
            yield _event({"choices": [{"index": 0, "text": reader.feed((token,)), "finish_reason": None}]})
        last = {"index": 0, "text": reader.flush(), "finish_reason": "length"}
        yield _event({"choices": [last]})
        yield _event({"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": num}})
        yield "data: [DONE]\n\n"

    async def completions(asked: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(stream(asked), media_type="text/event-stream")

    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": CAPACITY}]}

    app.post("/v1/completions")(completions)
    app.get("/v1/models")(models)
    return app


def _event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def main() -> None:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-llama")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    app = make_app(make_model(asked.model), asked.model, asked.workers)
    uvicorn.run(app, host="127.0.0.1", port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
