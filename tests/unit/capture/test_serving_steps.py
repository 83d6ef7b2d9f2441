"""The steps of serving, undivided: chunks, inserts and decodes give what the model gives for a whole text."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from tessera.capture import Workload, build, record
from tessera.capture.models import another
from tessera.errors import CaptureError, UnknownName
from tessera.ir import BufferKind, Step

ROWS, CAPACITY = 3, 48
Steps = dict[str, Workload]


def steps_of(model: str, chunk: int) -> Steps:
    """The steps of one model over the same weights."""
    decode = build(Step(model, "decode", ROWS, CAPACITY))
    found = {"decode": decode, "insert": another(decode, Step(model, "insert", ROWS, CAPACITY))}
    if chunk:
        found["chunk"] = another(decode, Step(model, "chunk", 1, chunk, 0, CAPACITY - chunk))
    return found


class Slot:
    """One batch with its spare row, run step by step."""

    def __init__(self, steps: Steps, chunk: int) -> None:
        self.steps, self.chunk = steps, chunk
        made = {k: v for w in steps.values() for k, v in w.make_state(0).items()}
        self.state = {name: torch.zeros_like(tensor) for name, tensor in made.items()}

    def run(self, kind: str, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        workload = self.steps[kind]
        return workload.run(inputs, {name: self.state[name] for name in workload.make_state(0)})

    def read(self, row: int, prompt: list[int], lengths: Sequence[int] = ()) -> int:
        """Reads a prompt in chunks, full ones or of these lengths, into a row; the token that follows it."""
        outputs: dict[str, torch.Tensor] = {}
        starts = [0, *accumulate(lengths)] if lengths else [*range(0, len(prompt), self.chunk), len(prompt)]
        for start, stop in pairwise(starts):
            part = prompt[start:stop]
            # Padding that would be out of bounds everywhere if it were looked at.
            tokens = torch.full((1, self.chunk), 10**6)
            positions = torch.full((1, self.chunk), 10**6)
            tokens[0, : len(part)] = torch.tensor(part)
            positions[0, : len(part)] = torch.arange(start, start + len(part))
            last = torch.tensor([len(part) - 1])
            outputs = self.run("chunk", tokens=tokens, positions=positions, last=last)
        self.run("insert", row=torch.tensor([row]))
        return int(outputs["next_tokens"][0])

    def decode(self, tokens: list[int], positions: list[int]) -> list[int]:
        outputs = self.run(
            "decode", tokens=torch.tensor(tokens)[:, None], positions=torch.tensor(positions)[:, None]
        )
        found: list[int] = outputs["next_tokens"].tolist()
        return found


def wanted(module: Any, prompt: list[int], num: int) -> list[int]:
    """What Hugging Face's own attention says, each token from the whole text."""
    text = list(prompt)
    if module.config.model_type != "mamba2":
        module.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            for _ in range(num):
                logits = module(input_ids=torch.tensor([text]), use_cache=False).logits
                text.append(int(logits[0, -1].argmax()))
    finally:
        if module.config.model_type != "mamba2":
            module.set_attn_implementation("tessera")
    return text[len(prompt) :]


def prompt_of(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(0, 256, (length,), generator=random).tolist()
    return found


@pytest.mark.parametrize(
    ("model", "chunk"),
    [("tiny-llama", 8), ("tiny-gpt-oss", 3), ("tiny-gpt-oss", 8), ("tiny-gpt-oss", 20)],
)
def test_rows_at_different_positions_get_the_models_tokens(model: str, chunk: int) -> None:
    """Prompts read in chunks and decoded side by side continue as the model does, windows and all."""
    slot = Slot(steps_of(model, chunk), chunk)
    prompts = [prompt_of(length, length) for length in (5, 23, 16)]
    answers = [[slot.read(row, prompt)] for row, prompt in enumerate(prompts)]
    for _ in range(9):
        positions = [len(p) + len(a) - 1 for p, a in zip(prompts, answers, strict=True)]
        for answer, token in zip(answers, slot.decode([a[-1] for a in answers], positions), strict=True):
            answer.append(token)
    module = slot.steps["decode"].module
    assert answers == [wanted(module, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize("lengths", [(5, 8, 1, 7, 2), (1, 1, 8, 8, 5), (8, 3, 8, 4)])
def test_where_a_prompt_is_cut_does_not_matter(lengths: tuple[int, ...]) -> None:
    """Chunks that are not full, also in the middle, leave the ring and the answer as the model has them."""
    slot, prompt = Slot(steps_of("tiny-gpt-oss", 8), 8), prompt_of(23, 9)
    answer = [slot.read(0, prompt, lengths)]
    for _ in range(5):
        answer.append(slot.decode([answer[-1], 0, 0], [len(prompt) + len(answer) - 1, 0, 0])[0])
    assert answer == wanted(slot.steps["decode"].module, prompt, 6)


def test_a_row_that_joins_later_does_not_disturb_the_others() -> None:
    """A prompt read between decodes leaves the answers in other rows as they were, and gets its own."""
    slot = Slot(steps_of("tiny-gpt-oss", 8), 8)
    first, second = prompt_of(13, 1), prompt_of(11, 2)
    answer, other = [slot.read(2, first)], list[int]()
    for turn in range(8):
        if turn == 3:
            other = [slot.read(0, second)]
        tokens = [other[-1] if other else 0, 0, answer[-1]]
        positions = [len(second) + len(other) - 1 if other else 0, 0, len(first) + len(answer) - 1]
        given = slot.decode(tokens, positions)
        answer.append(given[2])
        other += [given[0]] if other else []
    module = slot.steps["decode"].module
    assert (answer, other) == (wanted(module, first, 9), wanted(module, second, 6))


def test_a_row_is_used_again_without_a_trace_of_the_last_request() -> None:
    """What an earlier, longer request left in a row is never seen by the next one."""
    slot = Slot(steps_of("tiny-llama", 8), 8)
    slot.read(1, prompt_of(40, 3))
    short = prompt_of(2, 4)
    answer = [slot.read(1, short)]
    for _ in range(4):
        answer.append(slot.decode([0, answer[-1], 0], [0, len(short) + len(answer) - 1, 0])[1])
    assert answer == wanted(slot.steps["decode"].module, short, 5)


def test_a_recurrent_model_reads_its_prompt_by_decoding() -> None:
    """An insert of the empty spare row clears a row, and decodes read the prompt and go on."""
    slot = Slot(steps_of("tiny-mamba", 0), 0)
    prompts = {0: prompt_of(6, 5), 2: prompt_of(9, 6)}
    for name, tensor in slot.state.items():
        if not name.startswith("row."):
            tensor.normal_()  # what earlier requests left
    texts = {row: list(prompt) for row, prompt in prompts.items()}
    for row in prompts:
        slot.run("insert", row=torch.tensor([row]))
    for at in range(13):
        tokens = torch.tensor([[texts[row][at] if row in texts else 7] for row in range(ROWS)])
        given = slot.run("decode", tokens=tokens)["next_tokens"].tolist()
        for row, text in texts.items():
            if at + 1 == len(text):
                text.append(given[row])
    module = slot.steps["decode"].module
    for row, prompt in prompts.items():
        assert texts[row][len(prompt) :] == wanted(module, prompt, 14 - len(prompt))


def test_steps_share_state_by_name() -> None:
    """Chunk and insert have the spare row in common, insert and decode the batch, with the same sizes."""
    found = {kind: record(workload) for kind, workload in steps_of("tiny-gpt-oss", 8).items()}
    sizes = {
        kind: {trace.buffers[b].name: trace.buffers[b].size_bytes for b in trace.buffers_of(BufferKind.STATE)}
        for kind, trace in found.items()
    }
    assert sizes["chunk"] | sizes["decode"] == sizes["insert"]
    assert all(name.startswith("row.") for name in sizes["chunk"])


def test_an_insert_reads_and_writes_in_launches_of_their_own() -> None:
    """No launch touches both the spare row and the batch, so the two may be on different devices."""
    trace = record(steps_of("tiny-llama", 8)["insert"])
    for launch in trace.launches:
        names = {trace.buffers[a.buffer].name for a in launch.accesses}
        state = {n for n in names if n.removeprefix("row.").partition(".")[0] in ("keys", "values")}
        assert len(state) == 1


def test_what_a_model_is_not_served_by_is_refused() -> None:
    """A recurrent model has no chunk, and a chunk may not go beyond the model's positions."""
    with pytest.raises(UnknownName, match="chunk"):
        build(Step("tiny-mamba", "chunk", 1, 8))
    with pytest.raises(CaptureError, match="positions"):
        build(Step("tiny-llama", "chunk", 1, 8, 0, 4096))
