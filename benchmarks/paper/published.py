"""What the publication (arXiv 2604.10180) reports beside each figure, and why ours differs.

Only statements that this project has a record of are repeated. Where it has none, that is said, and the
comparison is left to a reader who has the publication at hand.
"""

from dataclasses import dataclass

CITED = "arXiv 2604.10180"
NO_RECORD = "The publication has a figure of this kind; its numbers are not repeated here."


@dataclass(frozen=True, slots=True)
class Published:
    """Beside one figure."""

    reports: str
    differs: str


PUBLISHED = {
    "heterogeneity": Published(
        "Kernels of one model differ in which of an A100 and an L40S runs them faster (ratio "
        "distribution and bars per kernel).",
        "The publication measured kernels on the cards; these are compiled launches, priced from public "
        "tables where installed and from fitted models elsewhere, so small elementwise kernels are less "
        "certain than GEMM and attention.",
    ),
    "throughput": Published(
        "Up to 2.3 times the throughput of disaggregation baselines, by one placement from a mixed-integer "
        "program without a limit of memory.",
        "Every policy here has its own best batch and microbatches, at equal memory and an equal limit of "
        "time. Much of the distance to a strict split is load balance, which a fractional split or data "
        "parallelism has too, so against the best of all baselines the gain is smaller. Costs are modelled, "
        "and requests are alike.",
    ),
    "cost": Published(
        NO_RECORD,
        "Dollars for a million tokens at one provider's list prices on one day, at simulated throughput; "
        "GPUs without a price have no figure. The cards alike are as many of the one that is best alone.",
    ),
    "online": Published(
        "A monitor switches between a latency and a throughput policy as the request rate changes. "
        + NO_RECORD,
        "Here the load at which to switch is computed from the two plans, which are of one batch; arrivals "
        "are Poisson, bursty or from a public log, with drawn lengths, served on a virtual clock.",
    ),
    "sensitivity": Published(
        NO_RECORD,
        "The monitor here has no load threshold to set: its threshold is how many standard errors of the "
        "counted load must agree before it switches.",
    ),
    "scaling": Published(
        NO_RECORD,
        "Up to 16 GPUs here are simulated with every two joined by a link of their own; beyond three, plans "
        "are made of pairs side by side, so that a switch which they share costs little.",
    ),
    "links": Published(
        "Transfers between machines are started by the GPU over InfiniBand. " + NO_RECORD,
        "Links here have one latency and one bandwidth; contention is simulated, protocol effects are not.",
    ),
    "regimes": Published(
        "This project has no record of such a map in the publication.",
        "A product must also say where there is nothing to gain; similar cards of different size gain "
        "nothing.",
    ),
}
