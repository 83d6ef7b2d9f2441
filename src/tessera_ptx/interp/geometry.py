"""Grid and block: which lanes there are and what their special registers hold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera_ptx.errors import BadLaunch
from tessera_ptx.interp.types import Array

if TYPE_CHECKING:
    from tessera_ptx.interp.layout import Layout

Dim3 = int | tuple[int, ...]
WARP = 32


@dataclass(frozen=True, slots=True)
class Geometry:
    """A launch's shape; blocks are numbered x first."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: int  # blocks of a cluster, along x

    @staticmethod
    def of(grid: Dim3, block: Dim3, cluster: int) -> "Geometry":
        """Checked and filled up to three axes."""
        shapes = []
        for name, given in (("grid", grid), ("block", block)):
            dims = (given,) if isinstance(given, int) else tuple(given)
            if not 1 <= len(dims) <= 3 or min(dims) < 1:
                raise BadLaunch(f"{name} {given} is no launch shape")
            shapes.append((*dims, 1, 1)[:3])
        geometry = Geometry((*shapes[0],), (*shapes[1],), cluster)  # type: ignore[arg-type]
        if geometry.size > 1024:
            raise BadLaunch(f"a block of {geometry.size} threads; at most 1024 are possible")
        if geometry.grid[0] % cluster:
            raise BadLaunch(f"a grid of {geometry.grid[0]} blocks is no multiple of clusters of {cluster}")
        return geometry

    @property
    def size(self) -> int:
        """Threads of a block."""
        return int(np.prod(self.block))

    @property
    def threads(self) -> int:
        """Lanes of a block: its threads filled up to full warps."""
        return -(-self.size // WARP) * WARP

    def batches(self, lanes_at_once: int) -> Iterator[range]:
        """Blocks to run together, whole clusters at a time."""
        step = max(lanes_at_once // self.threads // self.cluster, 1) * self.cluster
        total = int(np.prod(self.grid))
        for first in range(0, total, step):
            yield range(first, min(first + step, total))

    def lanes(self, blocks: range) -> int:
        """Lanes of a batch."""
        return len(blocks) * self.threads

    def exists(self, blocks: range) -> Array:
        """Lanes that are threads and not padding."""
        mask: Array = np.tile(np.arange(self.threads) < self.size, len(blocks))
        return mask

    def special(self, blocks: range, layout: "Layout") -> dict[str, Array]:
        """Special registers of every lane."""
        lanes = self.lanes(blocks)
        thread = np.tile(np.arange(self.threads), len(blocks))
        cta = np.repeat(np.arange(blocks.start, blocks.stop), self.threads)
        lane = thread % WARP
        found: dict[str, Array] = {}
        for axis, (index, size) in enumerate(((thread, self.block), (cta, self.grid))):
            names = ("%tid", "%ntid") if axis == 0 else ("%ctaid", "%nctaid")
            parts = index % size[0], index // size[0] % size[1], index // (size[0] * size[1])
            for letter, part, extent in zip("xyz", parts, size, strict=True):
                found[f"{names[0]}.{letter}"] = part
                found[f"{names[1]}.{letter}"] = np.full(lanes, extent)
        one = np.uint64(1)
        bit = one << lane.astype(np.uint64)
        found |= {
            "%laneid": lane, "%warpid": thread // WARP, "%nwarpid": np.full(lanes, self.threads // WARP),
            "%lanemask_eq": bit, "%lanemask_lt": bit - one, "%lanemask_le": 2 * bit - one,
            "%lanemask_gt": ~(2 * bit - one), "%lanemask_ge": ~(bit - one),
            "%smid": np.zeros(lanes), "%nsmid": np.ones(lanes), "%gridid": np.zeros(lanes),
            "%dynamic_smem_size": np.full(lanes, layout.dynamic_bytes),
            "%total_smem_size": np.full(lanes, layout.shared_bytes),
        }  # fmt: skip
        found |= self._cluster(found["%ctaid.x"])
        return {
            name: (value.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32) for name, value in found.items()
        }

    def _cluster(self, block_x: Array) -> dict[str, Array]:
        rank, every = block_x % self.cluster, np.ones_like(block_x)
        found = {
            "%cluster_ctarank": rank, "%cluster_nctarank": every * self.cluster, "%cluster_ctaid.x": rank,
            "%cluster_nctaid.x": every * self.cluster, "%clusterid.x": block_x // self.cluster,
            "%nclusterid.x": every * (self.grid[0] // self.cluster),
            "%is_explicit_cluster": every * (self.cluster > 1),
        }  # fmt: skip
        for letter in "yz":
            found |= {f"%cluster_ctaid.{letter}": every * 0, f"%cluster_nctaid.{letter}": every}
        return found
