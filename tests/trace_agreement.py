"""Do a capture on a real device and one on fake tensors say the same?

Launches are compared in order: kernel, plain arguments, shapes, dtypes, strides (of more than one element)
and accesses, buffers being matched by who makes them. The differences that devices bring about are known:

  attention   the CPU runs `_scaled_dot_product_flash_attention_for_cpu` where a GPU runs flash or efficient
              attention, whose other arguments and results differ; queries, keys, values and result agree
  layout      a CPU lays attention's result out as its queries, a GPU position by position: one of the two
              may have to copy it afterwards (one `clone`)
  histogram   `histc` takes integers on a GPU and floats on the CPU: its input is converted to one or the
              other before it, and its result is of that type

Anything else is a difference.
"""

from dataclasses import dataclass, field

from tessera.ir import Access, Arg, Launch, Symbol, Trace, View

ATTENTION = "aten._scaled_dot_product_"
CLONE = "aten.clone.default"
HISTOGRAM = ("aten.histc.default", "aten._to_copy.default")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a comparison found."""

    # Launches that are the same in both.
    num_same: int
    # Differences that the table above explains, and those that it does not.
    explained: tuple[str, ...]
    differences: tuple[str, ...]


def compare(real: Trace, fake: Trace) -> Agreement:
    """Launch by launch."""
    walk = _Walk(real, fake)
    walk.run()
    return Agreement(walk.num_same, tuple(walk.explained), tuple(walk.differences))


@dataclass
class _Walk:
    real: Trace
    fake: Trace
    num_same: int = 0
    explained: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    # Buffer -> what it is called in both traces: the name of what is given, or who made it.
    real_names: dict[int, str] = field(default_factory=dict)
    fake_names: dict[int, str] = field(default_factory=dict)

    def run(self) -> None:
        i = j = 0
        while i < len(self.real.launches) and j < len(self.fake.launches):
            mine, theirs = self.real.kernel_of(i).name, self.fake.kernel_of(j).name
            differ = mine != theirs or self._shapes(self.real, i) != self._shapes(self.fake, j)
            if differ and mine == CLONE and self._copies_attention(self.real, i, self.real_names):
                i += 1
                continue
            if differ and theirs == CLONE and self._copies_attention(self.fake, j, self.fake_names):
                j += 1
                continue
            self._pair(i, j)
            if len(self.differences) > 20:
                return
            i, j = i + 1, j + 1
        if (i, j) != (len(self.real.launches), len(self.fake.launches)):
            self.differences.append(f"{len(self.real.launches)} launches against {len(self.fake.launches)}")

    @staticmethod
    def _shapes(trace: Trace, index: int) -> object:
        return [v.shape for v in trace.launches[index].outputs if v is not None]

    def _copies_attention(self, trace: Trace, index: int, names: dict[int, str]) -> bool:
        source, made = trace.launches[index].args[0], trace.launches[index].outputs[0]
        if (
            not isinstance(source, View)
            or made is None
            or not names.get(source.buffer, "").startswith("attention")
        ):
            return False
        names[made.buffer] = names[source.buffer]
        self.explained.append(f"layout: launch {index} copies attention's result on one device only")
        return True

    def _pair(self, i: int, j: int) -> None:
        mine, theirs = self.real.kernel_of(i).name, self.fake.kernel_of(j).name
        a, b = self.real.launches[i], self.fake.launches[j]
        is_attention = mine.startswith(ATTENTION) and theirs.startswith(ATTENTION)
        is_histogram = self._is_histogram(a, b, mine)
        if mine != theirs and not is_attention:
            self.differences.append(f"launch {i}/{j}: {mine} against {theirs}")
        elif is_attention and mine != theirs:
            self._compare(i, j, self._queries(a), self._queries(b))
            self.explained.append(f"attention: launch {i} is {mine} on one device, {theirs} on the other")
        elif is_histogram:
            self.explained.append(f"histogram: launch {i} ({mine}) has another type")
        else:
            self._compare(
                i, j, self._said(self.real, a, self.real_names), self._said(self.fake, b, self.fake_names)
            )
        kind = "attention" if is_attention else "histogram" if is_histogram else "launch"
        for x, y in zip(a.outputs, b.outputs, strict=False):
            if x is not None and y is not None:
                name = f"{kind} {i}"
                self.real_names.setdefault(x.buffer, name)
                self.fake_names.setdefault(y.buffer, name)

    def _compare(self, i: int, j: int, mine: object, theirs: object) -> None:
        if mine == theirs:
            self.num_same += 1
        else:
            name = self.real.kernel_of(i).name
            self.differences.append(f"launch {i}/{j} ({name}): {mine} against {theirs}")

    def _is_histogram(self, a: Launch, b: Launch, name: str) -> bool:
        kinds = {v.dtype for x in (a, b) for v in x.outputs if v is not None}
        return name in HISTOGRAM and kinds == {"float32", "int32"}

    @staticmethod
    def _queries(launch: Launch) -> object:
        views = [arg for arg in launch.args[:3] if isinstance(arg, View)]
        return [(v.dtype, v.shape) for v in (*views, launch.outputs[0]) if v is not None]

    def _said(self, trace: Trace, launch: Launch, names: dict[int, str]) -> object:
        """Everything a launch says, with buffers called by the names both traces share."""
        for access in launch.accesses:
            if access.buffer not in names and (access.read or trace.buffers[access.buffer].name[0] != "t"):
                names[access.buffer] = trace.buffers[access.buffer].name
        return (
            launch.scope,
            [_plain(arg, names) for arg in launch.args],
            [(key, _plain(arg, names)) for key, arg in launch.kwargs],
            [_plain(view, names) for view in launch.outputs],
            [_touch(access, names) for access in launch.accesses],
        )


def _plain(arg: Arg, names: dict[int, str]) -> object:
    """An argument without its buffer and its device, and without strides that nobody follows."""
    if isinstance(arg, View):
        strides = [s for n, s in zip(arg.shape, arg.stride, strict=True) if n > 1]
        dtype = "" if names.get(arg.buffer, "").startswith("histogram") else arg.dtype
        return (dtype, arg.shape, strides, arg.offset)
    if isinstance(arg, Symbol):
        return "device" if arg.kind == "device" else (arg.kind, arg.name)
    return [_plain(item, names) for item in arg] if isinstance(arg, tuple) else arg


def _touch(access: Access, names: dict[int, str]) -> object:
    return (names.get(access.buffer, "new"), access.region, access.read, access.write, access.atomic)
