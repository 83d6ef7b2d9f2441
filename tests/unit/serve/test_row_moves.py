"""Recurrent models whose prompts are read on one worker and answered on another: Hugging Face's answers.

Their state is kept by row, for hybrids beside pages; it goes along.
"""

import random
from pathlib import Path

import pytest
from benchmarks.coverage_models import MODELS

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from serving_factory import GREEDY, generated, read_all, wait_for
from tessera.ir import Load
from tessera.profile import parse_devices, wire
from tessera.serve.planning import prepare
from tessera.serve.records import Ask, ServeSpec
from tessera.serve.service import Service
from tessera.serve.steps import served
from tessera.serve.text import ByteText

DEVICES, NUM, TOKENS = "emu:a100,emu:l40s", 8, 24
WORDS = 96


@pytest.mark.parametrize("name", ["mamba2", pytest.param("jamba", marks=pytest.mark.slow)])
def test_state_by_row_goes_along(name: str, tmp_path: Path) -> None:
    next(model for model in MODELS if model.name == name).write(tmp_path)
    policies = ("prefill-decode",)
    spec = ServeSpec(
        2, 4, 64, 16, load=Load(16, TOKENS), policies=policies, effort="quick", random_weights=True
    )
    made = prepare(str(tmp_path), wire(parse_devices(DEVICES), ["pcie4"]), spec)
    rng = random.Random(1)
    asks = [
        Ask(tuple(rng.randrange(3, WORDS) for _ in range(5 + 2 * n)), TOKENS, GREEDY, ignores_end=True)
        for n in range(NUM)
    ]
    with (
        made.workers() as stepper,
        Service(stepper, made.policies, made.model.shape, ByteText(), log=lambda line: None) as service,
    ):
        found = [told.numbers for told in wait_for(read_all(service, asks))]
        snapshot = service.snapshot()

    module = served(str(tmp_path), ServeSpec(rows=4, capacity=64, joined=False, random_weights=True))
    reference = module.workloads[-1].module
    assert made.model.shape.has_rows
    assert [generated(reference, ask) for ask in asks] == found
    assert snapshot.pages_moved > 0
    assert "prefill-decode" == snapshot.policy
