"""SearchConfig: all tuning values of the planner's search.

Most bound work. Judge a change by the rates of `benchmarks/paper` and the gaps of
`benchmarks/bench_planner.py`.
"""

from dataclasses import dataclass

from tessera.errors import check_known


@dataclass(frozen=True, slots=True)
class SearchConfig:
    # Gaps that end column generation: two devices, more, with a depth limit.
    gap: float = 1e-4
    many_gap: float = 2e-4
    limited_gap: float = 1e-3
    max_rounds: int = 80
    # Smaller lanes are dropped.
    min_share: float = 1e-3

    # Byte prices tried until a placement fits.
    max_memory_tries: int = 40
    # Pricing rounds with memory rows; penalty for exceeding memory.
    max_memory_rounds: int = 30
    memory_penalty: float = 10.0
    # Rise of byte prices from first to last layer: equal layers would all move at one price.
    tilt: float = 0.5
    # Up to so many choices (nodes x devices) a MILP is solved.
    few_choices: int = 32

    # Largest table of an elimination: 128 KB fit in cache, exact for transformers on four devices; less with
    # memory prices, whose bound is unused.
    max_entries: int = 16_384
    max_memory_entries: int = 1024
    # Pairings of equal devices per placement.
    max_pairings: int = 16

    # Candidates per coarse policy; devices up to which all orders are tried.
    num_coarse: int = 2
    max_permuted: int = 4

    # Per device, of the linear program; launches above which fewer are tried.
    depths: tuple[float, ...] = (1.1, 1.35, 1.02, 1.2, 1.5, 2.0)
    depth_launches: int = 12_000
    # Quick simulations: minimum, maximum, launches of a unit that gets one.
    min_looks: int = 6
    max_looks: int = 96
    look_launches: int = 24_000
    # Per team and list of moves; single placements to start from.
    num_moves: int = 3
    num_single: int = 3
    # Mixes simulated in full: small units, large units; launches of a large unit.
    num_finalists: tuple[int, int] = (6, 2)
    large_launches: int = 4_500
    # A lane of a team has at least this share.
    least_share: float = 1 / 64

    # Candidates this close are equal (simulation error); the most robust, then the simplest wins.
    tie: float = 5e-4
    near_tie: float = 5e-3
    # Candidates compared under sampled costs; resolution of regrets.
    rival: float = 0.05
    max_rivals: int = 16
    regret_step: float = 2e-3
    num_samples: int = 200
    # Also tried where memory is short.
    fewer_microbatches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)

    # Device sets for cost and energy: solved, planned.
    max_solved: int = 12
    max_planned_sets: int = 4
    worth: float = 0.85

    # Rows x devices of a frontier: first, then; over all launches.
    narrow_rows: int = 32
    wide_rows: int = 512
    frontier_rows: int = 640_000
    # Gap that counts as optimal.
    met: float = 1e-4

    # (warm-up, measured) requests; None: the simulator's own.
    long_window: tuple[float, float] | None = None


FULL = SearchConfig()
QUICK = SearchConfig(max_looks=8, depths=(1.1, 1.35), long_window=(8.0, 16.0))
EFFORTS = {"full": FULL, "quick": QUICK}


def search_config(effort: str) -> SearchConfig:
    check_known("effort", effort, EFFORTS)
    return EFFORTS[effort]
