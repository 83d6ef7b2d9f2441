"""GraphStep: a torch.fx graph from Dynamo, with the names of its model.

Dynamo passes weights without modules, and their origin as metadata: the step holds them as buffers with
dotted names, and each node runs inside a call of an empty module named like its own, so a capture has the
model's scopes and weight names.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tessera.capture.blocks import like, unique
from tessera.errors import CaptureError

# L['self']._modules['layers'][0].weight
_STEP = re.compile(r"\['([^']*)'\]|\[(-?\d+)\]|\.(\w+)")
_PLUMBING = frozenset({"_modules", "_parameters", "_buffers"})
_ENTERS = re.compile("_increment_nesting$|^_enter_|_hooks_disable$")
_LEAVES = re.compile("_decrement_nesting$|^_exit_|_hooks_enable$")
_LINE = re.compile(r'File "([^"]+)", line (\d+)')

Path = tuple[str, ...]


class Place(torch.nn.Module):
    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


class GraphStep(torch.nn.Module):
    def __init__(self, graph: torch.fx.GraphModule, examples: Sequence[Any]) -> None:
        super().__init__()
        nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._graph = (graph,)  # a tuple hides it from submodules
        if _has_parts(graph):
            self._modules["graph"] = graph
        paths = [_source(node) for node in nodes]
        weights = [i for i, n in enumerate(nodes) if _is_weight(n, examples[i])]
        scopes = {node: _scope(node) for node in graph.graph.nodes}
        roots = {path[0] for path in (*(paths[i] for i in weights), *scopes.values()) if path}
        start = 1 if len(roots) == 1 else 0  # the only root is the model: drop its name
        named = {node: ".".join(path[start:]) for node, path in scopes.items()}
        self._places = {n: self._modules.setdefault(name, Place()) for n, name in named.items() if name}
        held = unique([".".join(paths[i][start:]) or nodes[i].name for i in weights])
        self._held = dict(zip(weights, held, strict=True))
        self._names = unique([_name(path, node) for path, node in zip(paths, nodes, strict=True)])

    @contextmanager
    def holding(self, args: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yields the arguments that are no weights."""
        try:
            for number, name in self._held.items():
                self._buffers[name] = like(args[number], args[number])
            yield {name: args[i] for i, name in enumerate(self._names) if i not in self._held}
        finally:
            self._buffers.update(dict.fromkeys(self._held.values()))

    def forward(self, **inputs: Any) -> Any:
        args = [
            self._buffers[self._held[i]] if i in self._held else inputs[name]
            for i, name in enumerate(self._names)
        ]
        nodes = _Nodes(self._graph[0], self._places)
        try:
            return nodes.run(*args)
        except BaseException:
            nodes.leave()
            raise


class _Nodes(torch.fx.Interpreter):
    def __init__(self, graph: torch.fx.GraphModule, places: dict[torch.fx.Node, Any]) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self._places = places
        self._left = list(graph.graph.nodes)

    def leave(self) -> None:
        """Leaves autocast and levels of torch.func that nodes have entered."""
        num_entered = 0
        for node in self._left:
            name = getattr(node.target, "__name__", "")
            if _ENTERS.search(name):
                num_entered += 1
            elif _LEAVES.search(name) and num_entered:
                num_entered -= 1
            elif _LEAVES.search(name):
                super().run_node(node)

    def run_node(self, n: torch.fx.Node) -> Any:
        self._left.remove(n)
        if n.op in ("placeholder", "output", "get_attr"):
            return super().run_node(n)
        run = functools.partial(super().run_node, n)
        try:
            place = self._places.get(n)
            return place(run) if isinstance(place, Place) else run()  # it may be the graph itself
        except CaptureError as error:
            raise CaptureError(error.message, error.remedy, place_of(n)) from error


def place_of(node: torch.fx.Node) -> str:
    """The model's line; its module where all lines are torch's."""
    lines = _LINE.findall(node.stack_trace or "")
    return ":".join(lines[-1]) if lines else f"module '{'.'.join(_scope(node)[1:])}'"


def _source(node: torch.fx.Node) -> Path:
    source = getattr(node.meta.get("grapharg"), "source", None) or getattr(node, "_dynamo_source", None)
    if source is None:
        return ()
    name = source.name() if callable(source.name) else source.name
    return _words(str(name))


def _name(path: Path, node: torch.fx.Node) -> str:
    return ".".join(path) if path and path != ("self",) else node.name


def _scope(node: torch.fx.Node) -> Path:
    stack = node.meta.get("nn_module_stack") or {}
    return _words(str(list(stack.values())[-1][0])) if stack else ()


def _words(text: str) -> Path:
    words = map("".join, _STEP.findall(text))
    return tuple(word for word in words if word not in _PLUMBING)


def _is_weight(node: torch.fx.Node, example: Any) -> bool:
    if not isinstance(example, torch.Tensor):
        return False
    marks = node.meta.get("tensor_dict") or {}
    return isinstance(example, torch.nn.Parameter) or bool(marks.get("_dynamo_static_input_type"))


def _has_parts(graph: torch.fx.GraphModule) -> bool:
    tensors = (graph._parameters, graph._buffers, graph._modules)
    return any(tensors) or any(isinstance(v, torch.Tensor) for v in vars(graph).values())
