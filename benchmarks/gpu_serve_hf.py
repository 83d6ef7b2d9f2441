"""What a user without Tessera runs: Hugging Face's static cache under torch.compile; used by gpu_serve.py.

The loop is leaner than `generate`: nothing looks at the tokens, which stay on the GPU. It runs in a process
of its own on the same card, a round whenever it is told to, so that neither side's settings reach the other.
"""

import argparse
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for its siblings, as benchmarks.*

from benchmarks.gpu_capture import _build, as_graph

from tessera.capture import Workload
from tessera.capture.workload import on_device
from tessera.ir import Step

Steps = tuple[Callable[[], Any], Callable[[], Any]]
# What runs until the process ends.
_OPEN = ExitStack()


class StaticDecode:
    """Greedy decoding of a batch over a static cache; every row stands at the same position."""

    def __init__(self, model: Any, batch: int, capacity: int, start: int) -> None:
        """`model` is used as it is, with attention by `sdpa`; the cache is full up to `start`."""
        from transformers import StaticCache

        model.set_attn_implementation("sdpa")
        device = next(model.parameters()).device
        self._model, self._start = model, start
        self.cache: Any = StaticCache(config=model.config, max_cache_len=capacity)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.positions = torch.full((1, 1), start, dtype=torch.int64, device=device)
        known = inspect.signature(type(model.model).forward).parameters
        self._takes_places = "cache_position" in known
        self.logits()  # allocates the cache
        self.reset()

    def logits(self) -> torch.Tensor:
        """One step of the model, for the tokens and positions held."""
        more = {"cache_position": self.positions[0]} if self._takes_places else {}
        logits: torch.Tensor = self._model(
            input_ids=self.tokens,
            position_ids=self.positions.expand(self.tokens.shape[0], -1),
            past_key_values=self.cache,
            use_cache=True,
            **more,
        ).logits[:, -1]
        return logits

    def step(self) -> None:
        """One token a row, fed back."""
        self.advance(self.logits().argmax(-1, keepdim=True))

    def advance(self, tokens: torch.Tensor) -> None:
        """The next step reads these tokens, one place further on."""
        self.tokens.copy_(tokens)
        self.positions.add_(1)

    def reset(self) -> None:
        """Back to the start."""
        self.positions.fill_(self._start)
        for layer in self.cache.layers:
            length = getattr(layer, "cumulative_length", None)
            if isinstance(length, torch.Tensor):
                length.fill_(self._start)
            elif length is not None:
                layer.cumulative_length = self._start


def named(model: str, layers: int) -> str:
    """The name of a model of the catalogue with so many layers, made known."""
    from tessera.capture.models import BUILDERS, catalog
    from tessera.capture.models.hf import CAUSAL_STEPS, SERVED_STEPS, built_in

    family, sizes, dtype = catalog.LANGUAGE[model]
    if sizes["num_hidden_layers"] == layers and model in BUILDERS:
        return model
    name = f"{model}-of-{layers}"
    fewer = {**sizes, "num_hidden_layers": layers}
    BUILDERS[name] = (partial(built_in, family, fewer, dtype), CAUSAL_STEPS, SERVED_STEPS)
    return name


def model_on_gpu(model: str, batch: int, capacity: int, layers: int) -> Workload:
    """The decode step with weights made on the GPU, and state that takes no time to make."""
    with torch.device("cuda"):
        workload = _build(Step(model, "decode", batch, capacity), layers)
    return blank(on_device(workload, "cuda:0"))


def blank(workload: Workload) -> Workload:
    """The same step whose state is random numbers made on the GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        shapes = {n: (tuple(t.shape), t.dtype) for n, t in workload.make_state(0).items()}

    def state(seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator("cuda").manual_seed(seed)
        return {n: torch.randn(s, generator=random, device="cuda", dtype=d) for n, (s, d) in shapes.items()}

    return replace(workload, make_state=state)


def hf_steps(workload: Workload, capacity: int, start: int, mode: str) -> Steps:
    """(step, reset) of the Hugging Face model with a static cache, compiled."""
    with torch.no_grad():
        decode = StaticDecode(workload.module, workload.step.batch, capacity, start)
        if mode == "reduce-overhead":
            call = torch.compile(decode.logits, mode="reduce-overhead", fullgraph=True)

            def step() -> None:
                torch.compiler.cudagraph_mark_step_begin()
                with torch.no_grad():
                    decode.advance(call().argmax(-1, keepdim=True))

            for _ in range(3):
                step()
            return step, decode.reset
        inner = None if mode.startswith("default") else "max-autotune-no-cudagraphs"
        compiled = torch.compile(decode.step, mode=inner, fullgraph=True)
        compiled()
        graph = as_graph(compiled)
    _OPEN.callback(lambda: compiled)  # its kernels are the graph's
    return graph.replay, decode.reset


def tokens_per_s(step: Callable[[], Any], reset: Callable[[], Any], batch: int, steps: int) -> float:
    """Steps one after the other from the same start, timed on the host from idle to idle."""
    reset()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return batch * steps / (time.perf_counter() - began)


class Beside:
    """The loop in a process of its own, which starts at once; use it in a `with` statement."""

    def __init__(self, sizes: Mapping[str, Any]) -> None:
        """`sizes`: model, layers, batch, capacity, steps and mode."""
        call = [sys.executable, __file__, "--sizes", json.dumps(dict(sizes))]
        self._process = subprocess.Popen(
            call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._ready: dict[str, Any] | None = None

    def __enter__(self) -> "Beside":
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20.0)

    def ready(self) -> dict[str, Any]:
        """Waits until it is compiled; how long that took."""
        if self._ready is None:
            self._ready = self._answer()
        return self._ready

    def ask(self) -> float:
        """Tokens a second of one round."""
        self.ready()
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return float(self._answer()["rate"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"the Hugging Face loop ended with exit code {self._process.wait()}")


def main() -> None:
    """Builds, compiles, and runs a round for every line that comes."""
    parser = argparse.ArgumentParser(description="Hugging Face's static cache, compiled.")
    parser.add_argument("--sizes", type=json.loads, required=True)
    sizes = parser.parse_args().sizes
    began, batch, steps = time.monotonic(), sizes["batch"], sizes["steps"]
    workload = model_on_gpu(sizes["model"], batch, sizes["capacity"], sizes["layers"])
    step, reset = hf_steps(workload, sizes["capacity"], sizes["capacity"] - steps - 8, sizes["mode"])
    print(json.dumps({"compiled s": round(time.monotonic() - began, 1)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"rate": tokens_per_s(step, reset, batch, steps)}), flush=True)


if __name__ == "__main__":
    main()
