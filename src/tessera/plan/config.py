"""SearchConfig: every tuning value of the planner's search, with the reason for each.

Entry points take a record and pass it down; nothing else decides how much is tried. Most values bound work:
they trade planning time against the rates of the quick evaluation (`benchmarks/paper`) and the gaps of
`benchmarks/bench_planner.py`; a change of one is judged by both.
"""

from dataclasses import dataclass

from tessera.errors import UnknownName


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How much the planner tries; the defaults are what users get."""

    # Column generation. Stop when the bound is this close: with two devices, with more (a round takes
    # longer), and with a limit of depth (the result is a proposal only).
    gap: float = 1e-4
    many_gap: float = 2e-4
    limited_gap: float = 1e-3
    # A safeguard: the gap ends the loop.
    max_rounds: int = 80
    # Lanes below this share of the requests are dropped; the simulator does not see them.
    min_share: float = 1e-3

    # Where memory is short. Tries of byte prices until a placement fits; fewer with more than two devices,
    # where a try takes long and a placement that fits is known.
    max_memory_tries: int = 40
    few_memory_tries: int = 8
    # Rounds of pricing with a memory row, and the rate that a mix would pay not to keep to memory.
    max_memory_rounds: int = 30
    memory_penalty: float = 10.0
    # Bytes of the first layers are cheaper by this share than those of the last: equal layers would all move
    # at one price.
    tilt: float = 0.5
    # Temporaries have no price: where a placement does not fit because of them, bytes cost this much more.
    memory_factors: tuple[float, ...] = (1.0, 1.25, 1.6, 2.5)
    # Up to so many choices (nodes x devices) the best single placement is found by a mixed-integer program.
    few_choices: int = 32
    few_limit_s: float = 1.0
    # Time limits of the mixed-integer programs: the policy single-placement, the proof that nothing fits.
    single_limit_s: float = 60.0
    shortage_limit_s: float = 20.0

    # Pricing. Entries of one table in `elimination`: 128 KB, which stays in cache; enough to be exact on
    # transformers with four devices.
    max_entries: int = 16_384
    # Sweeps of pairwise swaps; a sweep without gain ends them.
    max_sweeps: int = 6
    # A placement this close to the bound is the cheapest, as far as floating point can tell.
    exact: float = 1e-6
    # Pairings of equal cards that a placement is spread over.
    max_pairings: int = 16

    # Baselines. Candidates of one policy that are judged, and devices whose orders are all tried.
    num_coarse: int = 2
    max_permuted: int = 4

    # Local search. Depths of the linear program as multiples of the number of devices (the best one differs
    # from model to model), and launches of a unit above which fewer depths are tried.
    depths: tuple[float, ...] = (1.1, 1.35, 1.02, 1.2, 1.5, 2.0)
    depth_launches: int = 12_000
    # Quick simulations: at least, at most, and the launches of a unit that has one.
    min_looks: int = 6
    max_looks: int = 96
    look_launches: int = 24_000
    # Shares of the work that one microbatch may have.
    shares: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5)
    # Moves from one team by each estimate, and single placements to start from.
    num_moves: int = 3
    num_single: int = 3
    # Mixes that are simulated in full: of small units, of large ones; a unit of more launches is large.
    num_finalists: tuple[int, int] = (6, 2)
    large_launches: int = 4_500
    # A lane that fewer requests follow is rare: a short simulation never sees it.
    rare_share: float = 1 / 16
    # Least share of the work of a placement of a team.
    least_share: float = 1 / 64
    # Layers at which two placements are joined.
    num_cuts: int = 2
    # Segments of the best team that are moved: in vain in a row, at most, and what a move must gain.
    num_segments: int = 24
    max_segments: int = 72
    segment_gain: float = 1e-3

    # Judge. Candidates this close are equal (the simulator's own error), and the simplest is taken; where
    # costs state errors, the one that loses least when they are wrong.
    tie: float = 5e-4
    near_tie: float = 5e-3
    # Candidates that are compared under wrong costs, and the step in which regrets are told apart.
    rival: float = 0.05
    max_rivals: int = 16
    regret_step: float = 2e-3
    num_samples: int = 200
    # Microbatches that are tried besides the number asked for, where memory is short.
    fewer_microbatches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)

    # Cost and energy. Sets of devices: bounded, solved by the linear program, planned; a set below this
    # share of the best is not planned.
    max_bounded: int = 4096
    max_solved: int = 12
    max_planned_sets: int = 4
    worth: float = 0.85

    # Loads. Relative speed that makes a prefill of twice the rows worthwhile; factors tried around it.
    prefill_gain: float = 0.005
    prefill_near: tuple[float, float] = (0.25, 4.0)
    # Microbatches in flight as multiples of the number of devices.
    load_depths: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0)
    # Points that are planned in full, and points of a coarse policy that are simulated.
    max_planned: int = 4
    max_simulated: int = 6
    # A point of a coarse policy that cannot be better than another by this share is not simulated.
    curve_step: float = 0.05
    # What planning in full may add to a quick estimate; points that stay below with it are not planned.
    planning_gain: float = 1.08
    # Devices up to which a cluster with equal devices is also planned as one; sets of devices per objective.
    max_at_once: int = 3
    max_load_sets: int = 8

    # Latency. Rows x devices of a frontier: at first, at most, and over all launches of a step where plan
    # and bound are near each other or far apart.
    narrow_rows: int = 32
    wide_rows: int = 512
    frontier_rows: tuple[int, int] = (320_000, 1_280_000)
    # A plan this close to its bound is optimal; one farther away gets the widest frontier at once.
    met: float = 1e-4
    far: float = 0.02
    # Launches that local search times, and least number of trials: counts, not seconds, so that equal input
    # gives equal plans.
    timed_launches: int = 400_000
    min_trials: int = 8

    # (warm-up, measured) requests of a long simulation; None: the simulator's own.
    long_window: tuple[float, float] | None = None


FULL = SearchConfig()
QUICK = SearchConfig(max_looks=8, depths=(1.1, 1.35), max_planned=2, long_window=(8.0, 16.0))
# By the name that `--effort` takes.
EFFORTS = {"full": FULL, "quick": QUICK}


def search_config(effort: str) -> SearchConfig:
    if effort not in EFFORTS:
        raise UnknownName("effort", effort, EFFORTS)
    return EFFORTS[effort]
