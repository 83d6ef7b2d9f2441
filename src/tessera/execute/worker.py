"""CpuWorker: one process, one CPU device; and the entry of every worker process.

After each launch the queue says which run goes on. Memory is allocated when a program first runs in a
microbatch, and kept. A worker ends when the engine hangs up.
"""

import contextlib
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from typing import Any

import torch

from tessera import ir
from tessera.errors import TesseraError, WorkerError, first_line
from tessera.execute.engine_connection import EngineConnection
from tessera.execute.launcher import Launcher
from tessera.execute.memory import ProgramMemory, WorkerMemory, bind_storages, bytes_of, tensor_of
from tessera.execute.messages import Begin, Done, Failed, LateInputs, LoadLanes, Setup, pack, unpack
from tessera.execute.page_mover import PageCopier, PageMover
from tessera.execute.schedule import Job, Queue
from tessera.execute.transport import TransferArrived, open_transport
from tessera.execute.worker_loop import DeviceWorker
from tessera.ir.host import host_nodes
from tessera.kernels import PARTS

PF_EXITING = 0x4
# Between two looks for news while launches run; a look is a system call.
NEWS_S = 5e-4


@dataclass
class _Active:
    order: Begin
    program: ProgramMemory
    spans: list[tuple[int, float, float, float]] = field(default_factory=list)
    busy_s: float = 0.0
    # Scope of a mixture -> ends of its experts' rows.
    ends: dict[str, list[int]] = field(default_factory=dict)


class CpuWorker(DeviceWorker):
    def __init__(self, setup: Setup, engine: EngineConnection) -> None:
        super().__init__(setup, engine)
        self._queue = Queue()
        self._looked_s = 0.0
        self._active: dict[int, _Active] = {}
        # Orders of microbatches whose previous run has not ended.
        self._waiting: list[Begin] = []
        self._cancelled: set[int] = set()
        self._last: dict[int, int] = {}
        # Run -> (transfer, start, arrival); transfers may arrive before the order of their run.
        self._arrivals: dict[int, list[tuple[int, float, float]]] = {}
        self._launchers: list[Launcher] = []
        self._mixtures: dict[tuple[int, int], tuple[str, ir.View]] = {}
        self._state = self._memory = WorkerMemory(setup.device)
        self._programs_memory: dict[tuple[int, int, int], ProgramMemory] = {}
        self._add(LoadLanes(setup.programs, setup.traces))
        progress = setup.progress
        if progress is None:
            progress = torch.full((setup.microbatches, 2), -1, dtype=torch.int64)
        self._progress = progress.numpy().reshape(-1).data
        self._transport = open_transport(setup, self._links, engine.post)
        copier = PageCopier(torch.device("cpu"))
        self._pages = PageMover(setup, self._find, copier, self._links, engine.tell)

    def _handle(self, news: Any) -> None:
        if not isinstance(news, TransferArrived):
            super()._handle(news)
        elif news.run not in self._cancelled:
            self._transport.hold(news)
            self._queue.deliver(news.run, news.number)
            self._arrivals.setdefault(news.run, []).append((news.number, news.start_s, news.stop_s))

    def _advance(self) -> bool:
        arrived = self._transport.poll()
        for news in arrived or ():
            self._handle(news)
        job = self._queue.pick()
        if job is not None:
            self._go_on(job)
        return job is not None or arrived is not None

    def _load(self, new: LoadLanes) -> None:
        self._add(new)
        self._transport.load(new.programs)

    def _add(self, new: LoadLanes) -> None:
        for trace in new.traces:
            self._mixtures |= {
                (len(self._launchers), n): mixture for n, mixture in mixtures_of(trace).items()
            }
            self._launchers.append(Launcher(trace, torch.device("cpu")))
            kinds = (ir.BufferKind.WEIGHT,)
            self._memory.add_step(trace, bind_storages(trace, kinds, self._setup.weights, is_partial=True))
        self._programs += new.programs
        self._memory.add_homes(self._live)

    def _drop(self, lanes: Collection[int]) -> None:
        self._programs_memory = {k: held for k, held in self._programs_memory.items() if k[1] not in lanes}

    def _where(self) -> list[tuple[int, int, int]]:
        words = [int(value) for value in self._progress]
        return [(m, words[2 * m], words[2 * m + 1]) for m in range(len(words) // 2) if words[2 * m] >= 0]

    def _go_on(self, job: Job) -> None:
        """Runs one launch and its transfers, and more while the queue has no choice."""
        active = self._active[job.ticket]
        while True:
            for position in job.turn():
                if (act := active.program.actions[position]) is not None:
                    self._note(active.order, position)
                    act(active)
            if len(self._queue) > 1 or not job.is_ready:
                break
            if (now_s := time.monotonic()) - self._looked_s > NEWS_S:
                self._looked_s = now_s
                if not self._engine.is_empty:
                    break
        if job.is_done:
            self._queue.drop(job.ticket)
            self._finish(self._active.pop(job.ticket))
        else:
            self._note(active.order, job.position - 1)

    def _note(self, order: Begin, position: int) -> None:
        # This order never shows an old run at a new position.
        self._progress[2 * order.microbatch + 1] = position
        self._progress[2 * order.microbatch] = order.run

    def _action(
        self, instruction: ir.Instruction, binding: ProgramMemory, microbatch: int
    ) -> Callable[[_Active], object] | None:
        """An instruction bound to the places of its buffers, which stay; None if there is nothing to do."""
        match instruction:
            case ir.Run(launch):
                return self._launch(launch, binding)
            case ir.Fetch(launch):
                return lambda active: binding.memory.fetch(launch)
            case ir.Send(number) | ir.Recv(number):
                transfer = binding.program.transfers[number]
                contents = bytes_of(binding.memory.get(transfer.buffer), transfer.start, transfer.stop)
                make = (
                    self._transport.sender if isinstance(instruction, ir.Send) else self._transport.receiver
                )
                move = make(binding.program, microbatch, number, contents)
                return lambda active: move(active.order.run)
        return None

    def _launch(self, launch: int, binding: ProgramMemory) -> Callable[[_Active], None]:
        step, memory = binding.program.step, binding.memory
        launcher = self._launchers[step]
        scope, view = self._mixtures.get((step, launch), ("", None))
        ends = None if view is None else tensor_of(memory.get(view.buffer), view).numpy()

        def run(active: _Active) -> None:
            wants_spans = active.order.wants_spans
            start, cpu = time.monotonic(), time.thread_time() if wants_spans else 0.0
            memory.use_slot(launch)
            launcher.run(launch, memory)
            stop = time.monotonic()
            active.busy_s += stop - start
            if ends is not None:
                active.ends[scope] = ends.tolist()
            if wants_spans:
                active.spans.append((launch, start, stop, time.thread_time() - cpu))

        return run

    def _begin(self, order: Begin) -> None:
        self._last[order.microbatch] = order.run
        if any(active.order.microbatch == order.microbatch for active in self._active.values()):
            self._waiting.append(order)
            return
        binding = self._memory_of(order.microbatch, order.lane, order.index)
        for name, packed in (*order.inputs.items(), *order.state.items()):
            if name in binding.buffers:
                binding.memory.put(binding.buffers[name], unpack(packed).untyped_storage())
        self._active[order.run] = _Active(order, binding)
        self._note(order, -1)
        instructions = binding.program.instructions[self._setup.device]
        gate = binding.late_at if order.is_open else -1
        job = Job(order.microbatch, order.run, instructions, until_wait_us=binding.until_wait_us, gate=gate)
        self._queue.add(job)
        self._transport.watch(order.run, binding.program, order.microbatch)
        if job.is_done:  # only holds an output or receives state
            self._queue.drop(order.run)
            self._finish(self._active.pop(order.run))

    def _give(self, late: LateInputs) -> None:
        active = self._active.get(late.run)
        if active is not None:  # else it was cancelled; no run before it is left
            for name, packed in late.inputs.items():
                active.program.memory.put(active.program.buffers[name], unpack(packed).untyped_storage())
            self._queue.release(late.run)

    def _memory_of(self, microbatch: int, lane: int, index: int) -> ProgramMemory:
        key = (microbatch, lane, index)
        if key not in self._programs_memory:
            program = self._programs[lane][index]
            us = self._setup.us[program.step] if self._setup.us else ()
            binding = self._programs_memory[key] = self._memory.program_memory(microbatch, program, us)
            column = program.instructions[self._setup.device]
            binding.actions.extend(self._action(x, binding, microbatch) for x in column)
        return self._programs_memory[key]

    def _cancel(self, run: int) -> None:
        self._cancelled.add(run)
        self._arrivals.pop(run, None)
        self._transport.forget(run, next((m for m, last in self._last.items() if last == run), None))
        self._waiting = [order for order in self._waiting if order.run != run]
        if (active := self._active.pop(run, None)) is not None:
            self._queue.drop(run)
            self._progress[2 * active.order.microbatch] = -1

    def _finish(self, active: _Active) -> None:
        order, binding = active.order, active.program
        outputs = {
            name: pack(tensor_of(binding.memory.get(view.buffer), view))
            for name, view in binding.outputs.items()
            if name not in order.skips
        }
        state = (
            {name: pack(contents) for name, contents in binding.state.items()} if order.wants_state else {}
        )
        arrivals = self._arrivals.pop(order.run, [])
        transfers = arrivals if order.wants_spans else []
        experts = {
            scope: [end - begin for begin, end in pairwise([0, *ends])] for scope, ends in active.ends.items()
        }
        self._engine.tell(
            Done(order.run, outputs, state, active.spans, transfers, active.busy_s, experts=experts)
        )
        self._progress[2 * order.microbatch] = -1
        following = next((x for x in self._waiting if x.microbatch == order.microbatch), None)
        if following is not None:
            self._waiting.remove(following)
            self._begin(following)


def mixtures_of(trace: ir.Trace) -> dict[int, tuple[str, ir.View]]:
    """Part of a mixture -> its scope, and the ends of its experts' rows."""
    mixtures = {}
    for number, launch in enumerate(trace.launches):
        place = PARTS.get(trace.kernel_of(number).name)
        if place is not None and isinstance(ends := launch.args[place], ir.View):
            mixtures[number] = launch.scope, ends
    return mixtures


def main(pipe: Pipe, folder: str, queues: int) -> None:
    gc.freeze()  # collections pass over what is inherited, whose pages they would copy
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the engine handles it
    # Streams that share a hardware queue wait for one another. Read when CUDA starts, with the first weight.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(queues))
    with contextlib.suppress(EOFError, OSError):
        try:
            setup = pipe.recv()
        except RuntimeError as error:  # CUDA did not start
            return pipe.send_bytes(f"its setup could not be read: {first_line(error)}".encode())
        engine = EngineConnection(setup.engine, setup.secret, setup.name)
        threading.Thread(target=_follow, args=(pipe, engine), daemon=True).start()
        serve(setup, engine)
    # Releases shared CUDA tensors: the engine's torch warns at exit about held ones.
    gc.collect()
    _clean_up(folder)
    os._exit(0)  # threads may still wait for lost peers


def _follow(pipe: Pipe, engine: EngineConnection) -> None:
    """Ends with the pipe, even if the connection was never opened."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv_bytes()
    engine.end()


def _clean_up(folder: str) -> None:
    """Removes the session's folder if the engine was killed; its name has the engine's process."""
    pid = os.path.basename(folder).split("-")[1]
    try:
        with open(f"/proc/{pid}/stat") as stat:
            is_gone = bool(int(stat.read().rpartition(")")[2].split()[6]) & PF_EXITING)
    except OSError:
        is_gone = True
    if is_gone:
        shutil.rmtree(folder, ignore_errors=True)


def serve(setup: Setup, engine: EngineConnection) -> None:
    _take_cores(setup.cluster.devices[setup.device])
    torch.set_grad_enabled(False)
    backend: DeviceWorker | None = None
    try:
        backend = _backend(setup, engine)
        backend.loop()
    except (BrokenPipeError, ConnectionResetError):
        pass
    except TesseraError as error:
        _tell_failure(engine, error.message, error.remedy)
    except Exception as error:  # noqa: BLE001 - a process boundary: the engine must hear of anything
        _tell_failure(engine, f"{type(error).__name__}: {error}", "")
    finally:
        if backend is not None:
            with contextlib.suppress(TesseraError, RuntimeError, OSError):  # the device has failed
                backend.close()
        engine.close()


def _take_cores(device: ir.Device) -> None:
    """A CPU worker has its share of a NUMA node's cores, other workers one thread."""
    torch.set_num_threads(max(1, device.num_cores))
    if device.num_cores:
        node = next((node for node in host_nodes() if node.number == device.ordinal), None)
        if node is not None:
            os.sched_setaffinity(0, node.cores)


def _backend(setup: Setup, engine: EngineConnection) -> DeviceWorker:
    if setup.cluster.devices[setup.device].kind is ir.DeviceKind.CUDA:
        from tessera.execute.cuda.worker import CudaWorker

        if not torch.cuda.is_available():
            message = "this machine has no CUDA device"
            raise WorkerError(message, "Start it where the GPU is; rank 0 computes too.")
        # Ordinals as this machine counts them, also where rank 0 computes beside the engine.
        devices = (replace(x, ordinal=0) if x.ordinal == ir.AWAY else x for x in setup.cluster.devices)
        cluster = replace(setup.cluster, devices=tuple(devices))
        return CudaWorker(replace(setup, cluster=cluster), engine)
    return CpuWorker(setup, engine)


def _tell_failure(engine: EngineConnection, message: str, remedy: str) -> None:
    with contextlib.suppress(OSError):
        engine.tell(Failed(message, remedy))
