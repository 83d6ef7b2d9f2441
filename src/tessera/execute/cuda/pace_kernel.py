"""PaceKernel: the one-thread kernel that keeps time on the device, before and after every launch.

A record is four words: when it was let in, when it may end, when it really ended (nanoseconds of the GPU's
%globaltimer), and one spare. One call does two things, either of which may be left out:

    leave   waits until the previous record's end (plus `extra`) has come, and writes when that was;
    enter   takes the next place in the queue of a device or link: start = max(now - slack, when it is free),
            end = start + hold, and the device is free from then on. Without a queue, start is now.

A queue is a word that says until when it is taken, and for a device one word more a microbatch: the key of
the launch that waits there, or zero. Then the least key goes first, as `execute.schedule` has it: the segment
of launches that is over soonest, of equal ones the one that came first. First come, first served alone would
let all requests in flight advance in step, so that the devices of a pipeline take turns instead of
overlapping. When a launch came is the middle of its key, in units of 1,024 ns; it starts over every 17 s, and
then a launch may go before its equal once. A launch that follows another at once raises its key before that
one has ended, so that it is not overtaken between the two.

So launches of several requests pass a device one at a time without any lock. A kernel waits for the clock
and for kernels with smaller keys that are running already, so every wait ends. The kernel touches its records
and its queue and nothing else, which `tests/unit/execute/test_cuda_pace_kernel.py` has the analyzer prove.
"""

from typing import Any

import torch

from tessera.execute.cuda.pace import SLACK_NS, Hold
from tessera.execute.kernel_launch import PtxKernel
from tessera.ir import Kernel, Origin

RECORD_WORDS = 4
# Which of them is when it was let in, when it may end, and when it ended.
STARTED, DUE, ENDED = 0, 1, 2
ENTRY = "tessera_pace"
SIGNATURE = (
    ("previous", "*u64"), ("extra_ns", "u64"), ("queue", "*u64"), ("next", "*u64"), ("hold_ns", "u64"),
    ("slack_ns", "u64"), ("places", "u64"), ("place", "u64"), ("key", "u64"), ("lead_ns", "u64"),
)  # fmt: skip
# A turn is taken this long before the device is free: what the launch needs to get going, in nanoseconds.
LEAD_NS = 2000
# Of a key: when the launch came, below the time that is left; the last bit is always set.
_CAME_BITS = 24
_CAME_SHIFT = 10
_MAX_LEFT_NS = 1 << 38

PTX = f"""
.version 7.0
.target sm_75
.address_size 64

.visible .entry {ENTRY}(
    .param .u64 previous, .param .u64 extra_ns, .param .u64 queue,
    .param .u64 next, .param .u64 hold_ns, .param .u64 slack_ns,
    .param .u64 places, .param .u64 place, .param .u64 key, .param .u64 lead_ns
)
.maxntid 1, 1, 1
{{
    .reg .pred %p<14>;
    .reg .b64 %rd<32>;

    ld.param.u64 %rd1, [previous];
    ld.param.u64 %rd2, [extra_ns];
    ld.param.u64 %rd3, [queue];
    ld.param.u64 %rd4, [next];
    ld.param.u64 %rd5, [hold_ns];
    ld.param.u64 %rd6, [slack_ns];
    ld.param.u64 %rd20, [places];
    ld.param.u64 %rd21, [place];
    ld.param.u64 %rd22, [key];
    ld.param.u64 %rd23, [lead_ns];
    mov.u64 %rd30, %globaltimer;
    shr.u64 %rd30, %rd30, {_CAME_SHIFT};
    and.b64 %rd30, %rd30, {(1 << _CAME_BITS) - 1};
    shl.b64 %rd30, %rd30, 1;
    add.u64 %rd22, %rd22, %rd30;

    setp.eq.u64 %p0, %rd1, 0;
    @%p0 bra ENTER;
    setp.eq.u64 %p5, %rd20, 0;
    @%p5 bra LEAVE;
    setp.ne.u64 %p6, %rd2, 0;
    @%p6 bra LEAVE;
    cvta.to.global.u64 %rd13, %rd3;
    mad.lo.u64 %rd24, %rd21, 8, %rd13;
    st.volatile.global.u64 [%rd24+8], %rd22;
LEAVE:
    cvta.to.global.u64 %rd7, %rd1;
    ld.global.u64 %rd8, [%rd7+8];
    add.u64 %rd8, %rd8, %rd2;
WAIT:
    mov.u64 %rd9, %globaltimer;
    setp.lt.u64 %p1, %rd9, %rd8;
    @%p1 bra WAIT;
    st.global.u64 [%rd7+16], %rd9;

ENTER:
    setp.eq.u64 %p2, %rd4, 0;
    @%p2 bra DONE;
    cvta.to.global.u64 %rd10, %rd4;
    mov.u64 %rd11, %globaltimer;
    sub.u64 %rd12, %rd11, %rd6;
    setp.eq.u64 %p3, %rd3, 0;
    @%p3 bra ALONE;
    cvta.to.global.u64 %rd13, %rd3;
    setp.ne.u64 %p7, %rd20, 0;
    @%p7 bra QUEUE;
    ld.volatile.global.u64 %rd14, [%rd13];
TAKE:
    max.u64 %rd15, %rd12, %rd14;
    add.u64 %rd16, %rd15, %rd5;
    atom.global.cas.b64 %rd17, [%rd13], %rd14, %rd16;
    setp.ne.u64 %p4, %rd17, %rd14;
    mov.u64 %rd14, %rd17;
    @%p4 bra TAKE;
    bra WRITE;
QUEUE:
    mad.lo.u64 %rd24, %rd21, 8, %rd13;
    st.volatile.global.u64 [%rd24+8], %rd22;
    membar.gl;
TURN:
    ld.volatile.global.u64 %rd14, [%rd13];
    mov.u64 %rd25, %globaltimer;
    add.u64 %rd25, %rd25, %rd23;
    setp.gt.u64 %p8, %rd14, %rd25;
    @%p8 bra TURN;
    mov.u64 %rd26, 0;
LOOK:
    setp.ge.u64 %p9, %rd26, %rd20;
    @%p9 bra CLAIM;
    mad.lo.u64 %rd27, %rd26, 8, %rd13;
    ld.volatile.global.u64 %rd28, [%rd27+8];
    add.u64 %rd26, %rd26, 1;
    setp.eq.u64 %p10, %rd28, 0;
    @%p10 bra LOOK;
    setp.ge.u64 %p11, %rd28, %rd22;
    @%p11 bra LOOK;
    bra TURN;
CLAIM:
    max.u64 %rd15, %rd12, %rd14;
    add.u64 %rd16, %rd15, %rd5;
    atom.global.cas.b64 %rd17, [%rd13], %rd14, %rd16;
    setp.ne.u64 %p12, %rd17, %rd14;
    @%p12 bra TURN;
    mov.u64 %rd29, 0;
    st.volatile.global.u64 [%rd24+8], %rd29;
    bra WRITE;
ALONE:
    mov.u64 %rd15, %rd11;
    add.u64 %rd16, %rd15, %rd5;
WRITE:
    st.global.u64 [%rd10], %rd15;
    st.global.u64 [%rd10+8], %rd16;
DONE:
    ret;
}}
"""


def kernel() -> Kernel:
    return Kernel(ENTRY, Origin.PTX, ptx=PTX, signature=SIGNATURE)


# (microbatches that may wait for a device, which of them this is, key); none: first come, first served.
Turn = tuple[int, int, int]
NO_TURN = (0, 0, 0)


class PaceKernel:
    """The kernel loaded on the current GPU."""

    def __init__(self) -> None:
        self._kernel = PtxKernel(kernel(), (1,))

    def __call__(
        self,
        leave: torch.Tensor | None,
        extra_ns: int,
        queue: torch.Tensor | None,
        enter: torch.Tensor | None,
        hold_ns: int,
        turn: Turn = NO_TURN,
    ) -> None:
        """On the current stream: leaves one record, enters another."""
        slack = SLACK_NS if queue is not None else 0
        self._kernel(
            (1, 1, 1), [leave, extra_ns, queue, enter, hold_ns, slack, *turn, LEAD_NS if turn[0] else 0]
        )


class Chain:
    """The records of one stream of one graph, in the order of its launches.

    Leaving is put off until the next launch enters, so that one kernel does both and the next launch is in
    the queue before the last has ended; whoever must see the end before that calls `settle`, or waits for
    `open` on another stream.
    """

    def __init__(self, pace_kernel: Any, queue: torch.Tensor | None, place: int = 0) -> None:
        """`place`: the microbatch that the stream belongs to."""
        self._pace_kernel, self._queue, self._place = pace_kernel, queue, place
        # A queue of one word has no places to wait at.
        self._places = queue.numel() - 1 if queue is not None else 0
        # The record that was not left yet.
        self.open: torch.Tensor | None = None
        self._extra_ns = 0

    @property
    def keeps_time(self) -> bool:
        """False if its records are stamps: then each is left at once, for the time that it took."""
        return self._queue is not None

    def enter(self, record: torch.Tensor, hold: Hold) -> None:
        turn = (self._places, self._place, key_of(hold)) if self._places else NO_TURN
        self._pace_kernel(self.open, self._extra_ns, self._queue, record, hold.hold_ns, turn)
        self.open, self._extra_ns = record, 0

    def arrive(self, record: torch.Tensor, extra_ns: int) -> None:
        """The next launch starts no earlier than `extra_ns` after the end of a copy's record."""
        self.settle()
        self.open, self._extra_ns = record, extra_ns

    def settle(self) -> None:
        """Nothing issued after this on the stream starts before the last launch is due."""
        if self.open is not None:
            self._pace_kernel(self.open, self._extra_ns, None, None, 0, NO_TURN)
            self.open = None


def key_of(hold: Hold) -> int:
    """What decides whose turn it is, the least first; never zero. The kernel adds when the launch came."""
    return (min(hold.left_ns, _MAX_LEFT_NS) << (_CAME_BITS + 1)) + 1
