"""Which way between GPUs is taken."""

from tessera.execute.cuda.probe import Transport, choose, transports


def make_found(*usable: str) -> tuple[Transport, ...]:
    """All four ways, some of them usable."""
    joins = {"same-card copies": "one card", "peer copies": "one machine", "NVSHMEM": "any", "NCCL": "any"}
    return tuple(Transport(n, j, True, n in usable, "") for n, j in joins.items())


def test_a_machine_without_a_gpu_has_no_way() -> None:
    """Every way is listed, with the reason why it is not there."""
    import torch

    if not torch.cuda.is_available():
        assert not any(t.is_usable for t in transports())
        assert {"no CUDA device"} == {t.why for t in transports()}
    assert 4 == len(transports())


def test_the_nearest_way_that_reaches_far_enough_is_taken() -> None:
    """Within a machine peer copies, between machines what joins any, the GPU-initiated one first."""
    everything = make_found("same-card copies", "peer copies", "NVSHMEM", "NCCL")

    names = [t.name for j in ("one card", "one machine", "any") if (t := choose(everything, j))]
    assert ["same-card copies", "peer copies", "NVSHMEM"] == names


def test_nccl_is_taken_where_there_is_no_symmetric_memory() -> None:
    """The fallback joins everything."""
    only = make_found("NCCL")

    assert ["NCCL"] * 3 == [t.name for j in ("one card", "one machine", "any") if (t := choose(only, j))]


def test_nothing_usable_is_nothing_chosen() -> None:
    """One GPU alone reaches no other machine."""
    assert choose(make_found("same-card copies"), "any") is None
