"""Weights that lie transposed: told to workers elsewhere, who lay theirs out alike."""

import pytest
import torch

import steps_factory as factory
from tessera.errors import MismatchError
from tessera.execute.lanes import Lanes
from tessera.execute.memory import ready_programs
from tessera.execute.messages import Setup, make_setups, pack_config, setup_of, unpack_config
from tessera.ir import Plan
from tessera.serve.records import ServeSpec
from tessera.serve.steps import for_cpu, served


def setup_for(plan: Plan, weights: dict[str, torch.Tensor]) -> Setup:
    """The setup of the plan's first device."""
    return make_setups(Lanes([plan]), ready_programs(plan), weights, 1)[plan.used[0]]


def test_a_worker_elsewhere_lays_its_weights_out_as_the_engine_does() -> None:
    """The same values in the same order in memory, whatever the layout was that the worker made."""
    plan, weights = factory.plan_by("single"), factory.prepared().model.weights()
    sent = unpack_config(pack_config(setup_for(plan, weights)))
    plain = {name: tensor.contiguous() for name, tensor in weights.items()}
    assert any(plain[name].stride() != tensor.stride() for name, tensor in weights.items())
    for name, tensor in setup_of(sent, plain, b"key", "").weights.items():
        assert tensor.stride() == weights[name].stride()
        assert torch.equal(tensor, weights[name])


def test_strides_that_no_weight_has_are_refused() -> None:
    """A configuration cannot make a worker take memory that the weight does not need."""
    plan, weights = factory.plan_by("single"), factory.prepared().model.weights()
    setup = setup_for(plan, weights)
    name, tensor = next((n, t) for n, t in setup.weights.items() if t.dim() == 2)
    setup.weights[name] = torch.empty_strided(tensor.shape, (10**4, 2)).copy_(tensor)
    with pytest.raises(MismatchError, match="cannot lie with strides"):
        setup_of(unpack_config(pack_config(setup)), weights, b"key", "")


def test_laying_out_changes_no_value() -> None:
    """Only linear layers are stored transposed; their values and all others are as they were."""
    plain, laid = (served("tiny-llama", ServeSpec(rows=2, capacity=16)) for _ in range(2))
    for_cpu(laid)
    wanted, found = plain.weights(), laid.weights()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    moved = {name for name in wanted if found[name].stride() != wanted[name].stride()}
    assert {"model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.gate_proj.joined_weight"} <= moved
    assert "model.embed_tokens.weight" not in moved
