"""Sequences read by steps of tokens as a service would: in parts, mixed, over shared and shuffled pages."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from tessera.capture import Workload
from tessera.capture.models.paged import layout_of
from tessera.kernels import PAGE, of_group


class Mixer:
    """Greedy answers of several prompts, some of whose tokens each step reads."""

    def __init__(self, workload: Workload, seed: int = 0) -> None:
        self._workload, self._step = workload, workload.step
        self._is_flat = layout_of(workload.module).is_packed
        self._windows = self._step.windows or (0,)
        self._random = random.Random(seed)
        self._free = list(range(1, self._step.reserve // PAGE))
        self._random.shuffle(self._free)
        self.state = {name: torch.zeros_like(t) for name, t in workload.make_state(0).items()}
        self._blank = {name: torch.zeros_like(t) for name, t in workload.make_inputs(0).items()}

    def answers(self, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
        """So many tokens for each prompt; sequences begin as others end."""
        waiting = [(number, list(prompt)) for number, prompt in enumerate(prompts)]
        done: dict[int, list[int]] = {}
        live: dict[int, _Sequence] = {}  # by row
        while waiting or live:
            while waiting and len(live) < self._step.batch:
                row = min(set(range(self._step.batch)) - live.keys())
                number, tokens = waiting.pop(0)
                live[row] = _Sequence(number, tokens, len(tokens) + num_new, len(self._windows))
            for row, token in self._advance(live).items():
                sequence = live[row]
                sequence.tokens.append(token)
                if len(sequence.tokens) == sequence.end:
                    done[sequence.number] = sequence.tokens[-num_new:]
                    self._free += [page for pages in sequence.pages for page in pages if page]
                    self._random.shuffle(self._free)
                    del live[row]
        return [done[number] for number in range(len(prompts))]

    def _advance(self, live: dict[int, "_Sequence"]) -> dict[int, int]:
        """One step; the tokens that it chose, by row."""
        counts = self._choose(live)
        inputs = {name: tensor.clone() for name, tensor in self._blank.items()}
        if not self._is_flat:
            inputs["fresh"].fill_(True)
            inputs["query_starts"].copy_(torch.arange(self._step.batch + 1))
        at = entry = 0
        places = {}
        for number, (row, count) in enumerate(counts.items()):
            sequence = live[row]
            place = number if self._is_flat else row
            at = at if self._is_flat else row
            positions = torch.arange(sequence.read, sequence.read + count)
            here = slice(at, at + count)
            inputs["tokens"][here] = torch.tensor(sequence.tokens)[positions]
            inputs["positions"][here] = positions
            for group, window in enumerate(self._windows):
                held = sequence.pages[group]
                behind = max(0, (sequence.read - window + 1) // PAGE) if window else 0
                self._free += [page for page in held[:behind] if page]
                held[:behind] = [0] * behind
                while len(held) * PAGE < sequence.read + count:
                    held.append(self._free.pop())
                pages = torch.tensor(held)
                slots = pages[positions // PAGE] * PAGE + positions % PAGE
                inputs[of_group("slots", group)][here] = slots
                inputs["pages"][entry : entry + len(held) - behind] = pages[behind:]
                inputs[of_group("page_starts", group)][place] = entry - behind
                entry += len(held) - behind
            inputs["lengths"][place] = sequence.read + count
            if self._is_flat:
                inputs["query_starts"][place + 1 :] = at + count
                if "rows" in inputs:
                    inputs["rows"][place] = row if sequence.read else -1 - row
            else:
                inputs["fresh"][row] = sequence.read == 0
            self._add_pictures(inputs, here)
            places[row] = place
            at += count
            sequence.read += count
        chosen = self._workload.run(inputs, self.state)["next_tokens"]
        return {
            row: int(chosen[place])
            for row, place in places.items()
            if live[row].read == len(live[row].tokens)
        }

    def _choose(self, live: dict[int, "_Sequence"]) -> dict[int, int]:
        """How many tokens of each sequence are read: some of some, or one of each."""
        if not self._is_flat or self._step.context == self._step.batch:
            return dict.fromkeys(sorted(live), 1)
        rows = self._random.sample(sorted(live), self._random.randint(1, len(live)))
        left, counts = self._step.context, {}
        for later, row in enumerate(rows):
            most = min(left - (len(rows) - later - 1), len(live[row].tokens) - live[row].read)
            counts[row] = self._random.randint(1, most)
            left -= counts[row]
        return counts

    def _add_pictures(self, inputs: dict[str, torch.Tensor], here: slice) -> None:
        if "rotary" in inputs:
            inputs["rotary"][:, here] = inputs["positions"][here]


class _Sequence:
    """A prompt and what was chosen, as far as it was read."""

    def __init__(self, number: int, tokens: list[int], end: int, num_groups: int) -> None:
        self.number, self.tokens, self.end = number, tokens, end
        self.read = 0
        self.pages: list[list[int]] = [[] for _ in range(num_groups)]


def generated(workload: Workload, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """What plain transformers generates with the same weights, one prompt at a time."""
    model = plain_model(workload.module)
    from transformers import GenerationConfig

    options = GenerationConfig(max_new_tokens=num_new, do_sample=False, pad_token_id=0)
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=options)
        found.append(out[0, len(prompt) :].tolist())
    return found


def plain_model(module: Any) -> Any:
    """A model as transformers makes it, with a module's weights."""
    config = type(module.config).from_dict(module.config.to_dict())
    for part in (config, config.get_text_config()):
        part.eos_token_id = None
    model = type(module)(config)
    model.load_state_dict(module.state_dict())
    return model.eval()
