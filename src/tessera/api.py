"""Tessera from Python: plan for devices, run a batch of prompts, serve.

    from tessera import LLM, plan, serve

    llama = plan("llama-3-8b", devices="emu:h20,emu:l40s", load=(1024, 256))
    llama.simulate(), llama.explain(), llama.save("llama.plan")

    with LLM("tiny-llama", devices="emu:a100,emu:l40s") as llm:
        print(llm.generate(["a"], max_tokens=4)[0].text)

    with serve("tiny-llama", devices="emu:a100,emu:l40s") as server:
        print(server.url)

Functions return the records of the commands of the same names; notebooks show them as tables. Options of
services are those of `tessera serve`, with `_` for `-`.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import msgspec

from tessera.cli import plan_model
from tessera.cli.chat import client_of
from tessera.cli.output import arguments_of
from tessera.cli.plan import PlanReasons, reasons_of
from tessera.cli.plan import plan as plan_command
from tessera.cli.serve import answering
from tessera.cli.serve import serve as serve_command
from tessera.cli.serve_options import ServeConfig
from tessera.cli.simulate import SimulatedService, SimulatedTimeline, simulate_plan
from tessera.cli.simulate import simulate as simulate_command
from tessera.errors import TesseraError, check_known
from tessera.ir import Load, ServicePlan, save
from tessera.simulate.arrivals import check_load

__all__ = ["LLM", "Completion", "ModelPlan", "SamplingParams", "Server", "plan", "serve"]

DEFAULT_LOAD = Load(prompt_tokens=1024, output_tokens=256)
# Requests in flight; the rest wait here.
MAX_AT_ONCE = 256


def plan(
    model: str,
    devices: str,
    load: Load | tuple[int, int] = DEFAULT_LOAD,
    *,
    link: str | Sequence[str] = (),
    objective: str = "throughput",
    effort: plan_model.Effort = "full",
    random_weights: bool = False,
    launches: Literal["compiled", "eager", ""] = "",
) -> "ModelPlan":
    """Plan a model for a load on devices, as `tessera plan MODEL` does.

    Args:
        model: Built-in name, folder with a `config.json`, or name in the local Hugging Face cache.
        devices: "emu:h20,emu:l40s" or "cuda:0,cuda:1".
        load: `Load`, or tokens of prompt and answer.
        link: "pcie5" or "emu:h20-emu:l40s=nvlink".
        objective: "throughput", "cost" (tokens per dollar) or "energy" (tokens per joule).
        effort: "full", or "quick" for a rougher plan sooner.
        random_weights: Do not look for weights.
        launches: "compiled" or "eager"; default: compiled where outlines are kept.
    """

    sizes = _load(load)
    arguments = arguments_of(
        plan_command,
        {
            "traces": model,
            "devices": devices,
            "link": link or None,
            "prompt_tokens": sizes.prompt_tokens,
            "output_tokens": sizes.output_tokens,
            "tpot_ms": sizes.tpot_ms,
            "ttft_ms": sizes.ttft_ms,
            "random_weights": random_weights,
            "launches": launches or None,
            "objective": objective,
            "effort": effort,
        },
    )
    target = arguments["options"].target(arguments["traces"][0])
    whole = replace(target.load, spread=sizes.spread, lengths=tuple(sizes.lengths))
    return ModelPlan(plan_model.plan_load(replace(target, load=whole), arguments["prices"].cluster()))


def _load(load: Any) -> Load:
    if isinstance(load, Load):
        check_load(load)
        return load
    if not isinstance(load, tuple | list) or len(load) != 2:
        raise TesseraError(f"must be a Load or (prompt tokens, answer tokens), got {load!r}", place="load")
    return Load(*load)


@dataclass(frozen=True)
class ModelPlan:
    """A plan for a load, beside other policies at their best."""

    planned: plan_model.PlannedModel

    @cached_property
    def figures(self) -> plan_model.ModelPlanFigures:
        """Rates, times, memory and rivals, as `tessera plan` prints them."""
        return plan_model.model_figures(self.planned)

    def simulate(
        self,
        requests: int | None = None,
        arrivals: str | None = None,
        lengths: str | None = None,
        seed: int = 0,
    ) -> SimulatedService | SimulatedTimeline:
        """Play the plan on a virtual clock.

        Args:
            requests: Number of requests; of service plans, with `arrivals`.
            arrivals: Service plans only: "poisson:RATE", "bursty:RATE" or a CSV file; default: full load.
            lengths: Tokens of prompts and answers that arrive, as "geometric:512,128"; default: the load's.
            seed: Random seed.
        """
        values = {"requests": requests, "arrivals": arrivals, "lengths": lengths, "seed": seed}
        options = arguments_of(simulate_command, {"plan": self.planned.plan.policy, **values})["options"]
        return simulate_plan(self.planned.plan, options)

    def explain(self) -> PlanReasons:
        """Why launches are placed so; for a service in its group with most devices."""
        plan = self.planned.plan
        if isinstance(plan, ServicePlan):
            plan = max(plan.groups, key=lambda group: len(group.plan.used)).plan
        return reasons_of(plan)

    def save(self, path: str | Path) -> Path:
        """Write the plan for `tessera serve --plan`, `simulate` or `run`."""
        save(self.planned.plan, Path(path))
        return Path(path)

    def __repr__(self) -> str:
        return f"ModelPlan({self.figures.policy}: {self.figures.headline})"

    def _repr_html_(self) -> str:
        return self.figures._repr_html_()


@dataclass(frozen=True)
class SamplingParams:
    """How answers are generated, by vLLM's names; None: the model's or OpenAI's default."""

    max_tokens: int | None = None
    # 0 is greedy.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logprobs: int | None = None

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


class Completion(msgspec.Struct, frozen=True):
    """The answer to one prompt; `document` is the server's."""

    prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]
    text: str
    # stop or length.
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    document: dict[str, Any]


class _Closing:
    def __init__(self, stack: ExitStack) -> None:
        self._close = weakref.finalize(self, stack.close)

    def close(self) -> None:
        """End workers and threads; further calls do nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LLM(_Closing):
    """A model with its workers in this process, for batches of prompts. They are answered as by a service."""

    def __init__(self, model: str, devices: str | None = None, **options: Any) -> None:
        """Plan, start one worker per device and load the weights.

        Args:
            model: Built-in name, folder with a checkpoint, or name in the local Hugging Face cache.
            devices: Default: this machine's GPUs, or its CPU.
            options: Further options of `tessera serve`, such as `max_model_len=4096`.
        """
        model, config = _service(model, devices=devices, **options)
        with ExitStack() as stack:
            at_once = min(MAX_AT_ONCE, config.max_waiting, config.max_requests)
            # Entered first: they end when the server has answered or ended their requests.
            self._threads = stack.enter_context(ThreadPoolExecutor(at_once, "tessera-llm"))
            self._client = stack.enter_context(client_of(model, config))
            super().__init__(stack.pop_all())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Continue prompts, all at once.

        Args:
            prompts: One text, or a list of texts or of lists of tokens.
            params: How answers are generated.
            sampling: Fields of `SamplingParams`, in place of `params`.
        """
        listed = [prompts] if isinstance(prompts, str) else _listed("prompts", prompts)
        if any(isinstance(prompt, int) for prompt in listed):
            message = "a prompt must be a text or a list of tokens, got numbers"
            raise TesseraError(message, "Put the tokens of one prompt into a list: [[1, 2]].", "prompts")
        return self._answers("/v1/completions", "prompt", listed, params, sampling)

    def chat(
        self,
        conversations: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> list[Completion]:
        """Answer one conversation or several, all at once, with the model's chat template."""
        listed = _listed("conversations", conversations)
        if listed and isinstance(listed[0], Mapping):
            listed = [listed]
        return self._answers("/v1/chat/completions", "messages", listed, params, sampling)

    def _answers(
        self,
        path: str,
        field: str,
        prompts: Sequence[Any],
        params: SamplingParams | None,
        sampling: dict[str, Any],
    ) -> list[Completion]:
        if not self._close.alive:
            raise TesseraError("this LLM is closed", "Make another.")
        common = _sampling(params, sampling).fields()
        if field == "messages" and "logprobs" in common:
            common |= {"top_logprobs": common["logprobs"], "logprobs": True}
        bodies = [{field: prompt, **common} for prompt in prompts]
        answers = list(self._threads.map(lambda body: self._client.post(path, body), bodies))
        for number, (status, document) in enumerate(answers):
            if status != 200:
                place = f"prompt {number} of {len(answers)}" if len(answers) > 1 else ""
                raise TesseraError(document["error"]["message"], place=place)
        return [_completion(prompt, answer) for prompt, (_, answer) in zip(prompts, answers, strict=True)]


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise TesseraError(f"must be a list, got {type(values).__name__}", place=name)
    return list(values)


def _sampling(params: Any, keywords: Mapping[str, Any]) -> SamplingParams:
    if params is None:
        names = [field.name for field in fields(SamplingParams)]
        for name in keywords:
            check_known("sampling parameter", name, names)
        return SamplingParams(**keywords)
    if keywords:
        raise TesseraError("sampling is given twice", "Give SamplingParams or keywords, not both.")
    if not isinstance(params, SamplingParams):
        raise TesseraError(f"must be SamplingParams, got {type(params).__name__}", place="params")
    return params


def _completion(prompt: Any, document: dict[str, Any]) -> Completion:
    choice, usage = document["choices"][0], document["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    counts = usage["prompt_tokens"], usage["completion_tokens"]
    return Completion(prompt, text or "", choice["finish_reason"], *counts, document)


class Server(_Closing):
    """A service that answers HTTP in this process until it is closed."""

    def __init__(self, model: str, config: ServeConfig) -> None:
        with ExitStack() as stack:
            self.url, self._thread = stack.enter_context(answering(model, config))
            super().__init__(stack.pop_all())

    def wait(self) -> None:
        self._thread.join()


def serve(model: str, devices: str | None = None, *, port: int = 8000, **options: Any) -> Server:
    """Serve a model over OpenAI's HTTP API from this process, as `tessera serve` does.

    Args:
        model: Built-in name, folder with a checkpoint, or name in the local Hugging Face cache.
        devices: Default: this machine's GPUs, or its CPU.
        port: 0: a free one, see `Server.url`.
        options: Further options of `tessera serve`, such as `api_key=["..."]`.
    """
    return Server(*_service(model, devices=devices, port=port, **options))


def _service(model: str, **options: Any) -> tuple[str, ServeConfig]:
    arguments = arguments_of(serve_command, {"model": model, **options})
    return arguments["model"], arguments["options"]
