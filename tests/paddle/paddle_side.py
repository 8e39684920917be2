"""The other environment: Paddle without torch, in a process that does what it is asked, line by line in JSON.

Run as `python -m tests.paddle.paddle_side`. A line is [name of a function below, arguments by name]; the answer is {"said": ...} or
{"error": [class, text]}. What Paddle prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import paddle

import liveweight as lw
from liveweight.errors import LiveWeightError

LAYERS: dict[str, Any] = {}
"""What was built, by a name, for later calls."""
PUBLISHERS: dict[str, lw.Publisher] = {}


def environment() -> dict[str, Any]:
    """Whether this is the environment that it should be."""
    return {"paddle": paddle.__version__, "torch": find_spec("torch") is not None}


def load(path: str) -> dict[str, Any]:
    """What Paddle reads from a file: dtype, shape and bytes of every tensor."""
    found = paddle.load(path, safetensors=True)
    return {name: described(tensor) for name, tensor in found.items()}


def described(tensor: Any) -> dict[str, Any]:
    """A tensor in JSON. NumPy has Paddle's bfloat16 as uint16: its bits."""
    return {
        "dtype": str(tensor.dtype).removeprefix("paddle."),
        "shape": list(tensor.shape),
        "bytes": tensor.numpy().tobytes().hex(),
    }


def save(path: str, tensors: dict[str, Any]) -> None:
    """Let Paddle write a file of these tensors in its safetensors form."""
    paddle.save({name: made(one) for name, one in tensors.items()}, path, safetensors=True)


def made(one: dict[str, Any]) -> Any:
    """A tensor from its JSON."""
    kind = "uint16" if one["dtype"] == "bfloat16" else one["dtype"]
    values = np.frombuffer(bytes.fromhex(one["bytes"]), dtype=kind).reshape(one["shape"])
    return paddle.to_tensor(values)


def copy(source: str, target: str) -> None:
    """Let Paddle read a safetensors file and write it again."""
    paddle.save(paddle.load(source, safetensors=True), target, safetensors=True)


class Block(paddle.nn.Layer):  # type: ignore[misc]
    """A layer that only holds others."""


def build(name: str, shapes: dict[str, list[int]], dtype: str, seed: int) -> list[str]:
    """A decoder's layers by the names and shapes of its HF checkpoint; the names of Linear layers, which Paddle has the other way round."""
    paddle.seed(seed)
    paddle.set_default_dtype("float32")
    root, linear = Block(), []
    for full, shape in shapes.items():
        *path, last = full.split(".")
        if len(shape) == 2 and "embed" not in full:
            held: Any = paddle.nn.Linear(shape[1], shape[0], bias_attr=False)
            linear.append(full)
        elif len(shape) == 2:
            held = paddle.nn.Embedding(*shape)
        else:
            held = Block()
            held.add_parameter(last, held.create_parameter(shape, default_initializer=None))
        place = root
        for part in path[:-1]:
            if part not in dict(place.named_children()):
                place.add_sublayer(part, Block())
            place = dict(place.named_children())[part]
        place.add_sublayer(path[-1], held)
    LAYERS[name] = root.to(dtype=dtype)
    return linear


def train(name: str, steps: int) -> None:
    """Real steps of a real optimiser: parameters change where they lie."""
    layer = LAYERS[name]
    optimiser = paddle.optimizer.SGD(learning_rate=0.1, parameters=layer.parameters())
    for _ in range(steps):
        loss = sum((one.cast("float32") ** 2).mean() for one in layer.parameters())
        loss.backward()
        optimiser.step()
        optimiser.clear_grad()


def meet(name: str, layer: str, url: str, directory: str, secret: str, mode: str = "ipc") -> None:
    """A publisher of a layer to an engine."""
    PUBLISHERS[name] = lw.Publisher(
        lw.paddle_source(LAYERS[layer]),
        engines=[url],
        directory=Path(directory),
        secret=Path(secret),
        transfer_mode=mode,
        threads=1,
    )


def publish(name: str, version: str) -> dict[str, Any]:
    """What came of it, whether the engine holds it to the bit, and where the parameters lie, which must not move."""
    report = PUBLISHERS[name].publish(version)
    verified = PUBLISHERS[name].verify()
    return {
        "digest": report.version.digest,
        "match": verified.match,
        "torch": "torch" in sys.modules,
        "modules": sorted(one for one in sys.modules if one.startswith("liveweight.worker.torch")),
    }


def close(name: str) -> None:
    """End a publisher."""
    PUBLISHERS.pop(name).close()


def checkpoint(name: str, path: str) -> None:
    """The layer's weights as an HF checkpoint has them, written by Paddle itself."""
    layer = LAYERS[name]
    linear = {
        f"{prefix}.weight" for prefix, one in layer.named_sublayers() if isinstance(one, paddle.nn.Linear)
    }
    state = {
        key: (value.T.contiguous() if key in linear else value) for key, value in layer.state_dict().items()
    }
    paddle.save(state, path, safetensors=True)


def source_facts() -> dict[str, Any]:
    """What a source gives out of a small layer: without a copy, tied tensors once, under other names."""
    layer = Block()
    layer.add_sublayer("embed", paddle.nn.Embedding(6, 4))
    layer.add_sublayer("square", paddle.nn.Linear(4, 4))
    layer.add_sublayer("head", Block())
    layer.head.add_parameter("weight", layer.embed.weight)
    layer = layer.to(dtype="bfloat16")
    source = lw.paddle_source(layer, rename=lambda name: f"model.{name}")
    manifest = source.manifest()
    given = dict(source.tensors())
    weight = layer.square.weight
    plain = lw.paddle_source(layer, transpose=False)
    return {
        "names": [[*spec.names] for spec in manifest],
        "dtypes": sorted({spec.dtype.value for spec in manifest}),
        "in_place": given["model.square.weight"].address == weight.data_ptr(),
        "strides": [list(given["model.square.weight"].strides), list(weight.strides)],
        "as_it_is": list(dict(plain.tensors())["square.weight"].strides),
        "held": source.held,
    }


def refusals() -> dict[str, list[str]]:
    """Every kind of wrong input, and the error text."""
    linear = paddle.nn.Linear(4, 6)
    state = linear.state_dict()
    late = lw.paddle_source(linear, transpose=False)
    late.manifest()
    linear.add_parameter("more", linear.create_parameter([2]))
    ways: dict[str, Callable[[], object]] = {
        "no layer": lambda: lw.paddle_source(3),
        "state dict": lambda: lw.paddle_source(state),
        "unknown name": lambda: lw.paddle_source(state, transpose=["weights"]).manifest(),
        "vector": lambda: lw.paddle_source(state, transpose=["bias"]).manifest(),
        "dtype": lambda: lw.paddle_source({"a": paddle.ones([2], "complex64")}, transpose=False).manifest(),
        "no tensor": lambda: lw.paddle_source({"a": 3}, transpose=False).manifest(),
        "changed": lambda: dict(late.tensors()),
    }
    return {name: told(way) for name, way in ways.items()}


def told(way: Callable[[], object]) -> list[str]:
    """Class and text of what it raises."""
    try:
        way()
    except LiveWeightError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (
        *(environment, load, save, copy, build, train, meet, publish, close, checkpoint),
        *(source_facts, refusals),
    )
}


def lines() -> Iterator[str]:
    """Requests from stdin, until it closes."""
    while line := sys.stdin.readline():
        yield line


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in lines():
        name, arguments = json.loads(line)
        try:
            answer = {"said": FUNCTIONS[name](**arguments)}
        except Exception as error:
            answer = {"error": [type(error).__name__, str(error)]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
