"""Other values for a program's inputs: of the same kind, and never the same."""

import pytest
import torch

from tessera.capture import Workload
from tessera.capture.workload import fresh_tensor
from tessera.ir import Step


def test_floats_stay_between_the_examples_and_what_is_not_finite_stays() -> None:
    """A mask of zeros and minus infinity keeps what it hides."""
    example = torch.tensor([0.5, 2.0, -torch.inf, 1.0])
    made = fresh_tensor(example, 1)

    assert -torch.inf == made[2]
    assert bool(((made[[0, 1, 3]] >= 0.5) & (made[[0, 1, 3]] <= 2.0)).all())
    assert not torch.equal(example, made)


def test_rising_rows_stay_rising_between_their_ends() -> None:
    """Offsets of sequences begin at nothing and end at the whole."""
    made = fresh_tensor(torch.tensor([0, 3, 7, 20]), 1)

    assert (0, 20) == (int(made[0]), int(made[-1]))
    assert bool((made.diff() >= 0).all())


def test_a_mask_of_ones_gets_padding_at_the_end() -> None:
    """Its first column stays, so that no row is empty."""
    made = fresh_tensor(torch.ones(64, 5, dtype=torch.long), 1)

    assert {0, 1} == set(made.flatten().tolist())
    assert bool((made[:, 0] == 1).all())
    assert bool((made.diff(dim=-1) <= 0).all())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.complex64])
def test_every_type_gets_other_values_of_its_own(dtype: torch.dtype) -> None:
    """And the same ones for the same seed."""
    example = torch.tensor([0, 1, 1, 2, 0, 1, 2, 2] * 4).to(dtype)
    made = fresh_tensor(example, 1)

    assert (dtype, example.shape) == (made.dtype, made.shape)
    assert not torch.equal(example, made)
    assert torch.equal(made, fresh_tensor(example, 1))


def test_a_program_that_takes_no_other_values_keeps_its_example() -> None:
    """What verifying then compares is said in words."""

    def only_ones(x: torch.Tensor) -> torch.Tensor:
        if not bool((x == 1).all()):
            raise ValueError("only ones")
        return x

    def workload(fn: object) -> Workload:
        assert callable(fn)
        return Workload(
            Step("made", "call", 1, 1),
            torch.nn.Module(),
            lambda inputs, state: {"y": fn(inputs["x"])},
            lambda seed: {"x": torch.ones(4)},
            lambda seed: {},
            lambda first, run, last: dict(first),
        )

    strict, strictly = workload(only_ones).varied()
    free, freely = workload(torch.exp).varied()

    assert torch.equal(torch.ones(4), strict.make_inputs(3)["x"])
    assert not torch.equal(torch.ones(4), free.make_inputs(3)["x"])
    assert ("the example's own: the model raises on others", "drawn like the example") == (strictly, freely)
