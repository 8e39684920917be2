"""Sources say what they will give, give what they said, and refuse by name what they cannot."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import liveweight as lw
from liveweight.checkpoint import INDEX, SINGLE, CheckpointSource
from liveweight.errors import LiveWeightError, ManifestInvalid, Refused, Unavailable
from liveweight.spec.dtype import DType
from liveweight.spec.manifest import Manifest, TensorSpec
from liveweight.spec.tensor_names import clean, without_data_parallel
from liveweight.trainer.sources.dtensor_shards import Shards
from liveweight.trainer.sources.in_memory import IteratorSource, ModuleSource, StateDictSource, as_source
from liveweight.trainer.sources.renamed_source import for_engines
from liveweight.trainer.sources.source import Source, check_tensor, one_pass, whole_pass
from liveweight.trainer.sources.tensors import torch_dtypes
from tests.arch.source_tree import SRC


def names_of(source: Source) -> list[str]:
    return [spec.name for spec in source.manifest()]


def a_pass(source: Source, manifest: Manifest) -> list[Tensor]:
    """One pass, as it is made over such a source."""
    names = [spec.name for spec in manifest]
    given = whole_pass(source, names) if source.held else one_pass(source, names)
    return cast("list[Tensor]", list(given))  # no source here has tensors of another kind


def read(source: Source) -> dict[str, Tensor]:
    """One checked pass."""
    manifest = source.manifest()
    result = {}
    for spec, tensor in zip(manifest, a_pass(source, manifest), strict=True):
        check_tensor(spec, tensor)
        result[spec.name] = tensor
    return result


class Net(nn.Module):
    """Parameters and buffers of every kind that a state dict tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.stack = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("rope", torch.arange(3), persistent=False)
        self.register_buffer("bias", torch.zeros(0, 3))
        self.register_buffer("later", None)


def wrapped(module: nn.Module, name: str) -> nn.Module:
    """A module that holds another under a wrapper's name."""
    outer = nn.Module()
    outer.add_module(name, module)
    return outer


# Names.


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("_orig_mod.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module.b._checkpoint_wrapped_module._orig_mod.weight", "a.b.weight"),
        ("base_model.model.a.q_proj.base_layer.weight", "a.q_proj.weight"),
        ("_orig_mod._fsdp_wrapped_module.base_model.model.a.weight", "a.weight"),
        ("a.base_model.model.weight", "a.base_model.model.weight"),
        ("base_layer.weight", "base_layer.weight"),
        ("a.base_layer", "a.base_layer"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
        ("weight", "weight"),
    ],
)
def test_wrappers_are_stripped_wherever_they_occur_and_nothing_else(raw: str, name: str) -> None:
    assert clean(raw) == name


@pytest.mark.parametrize(
    ("raw", "remedy"),
    [
        ("base_model.model.a.lora_A.default.weight", "merge_adapter"),
        ("a.lora_embedding_B.default", "merge_adapter"),
        ("base_model.model.head.modules_to_save.default.weight", "PEFT module itself"),
    ],
)
def test_an_adapters_tensor_is_refused_with_what_to_do(raw: str, remedy: str) -> None:
    with pytest.raises(ManifestInvalid, match=remedy) as caught:
        as_source({raw: torch.zeros(1)}).manifest()
    assert raw in str(caught.value)


def test_names_that_fall_together_are_refused_with_both_originals() -> None:
    twins = {"a.weight": torch.zeros(1), "_orig_mod.a.weight": torch.ones(1)}
    with pytest.raises(ManifestInvalid, match=r"a\.weight and _orig_mod\.a\.weight"):
        as_source(twins).manifest()


# Modules.


def test_a_module_gives_what_its_state_dict_holds_in_its_order() -> None:
    net = Net()
    source = as_source(net)
    expected = net.state_dict()
    assert names_of(source) == list(expected)
    assert {spec.name: spec.shape for spec in source.manifest()} == {k: v.shape for k, v in expected.items()}
    given = read(source)
    assert all(torch.equal(given[name], tensor) for name, tensor in expected.items())
    assert source.held


def test_wrapped_modules_have_the_names_of_the_bare_one() -> None:
    net = Net()
    net.stack[0] = wrapped(net.stack[0], "_checkpoint_wrapped_module")
    model = wrapped(wrapped(net, "_fsdp_wrapped_module"), "_orig_mod")
    assert names_of(as_source(model)) == list(Net().state_dict())


def test_a_compiled_module_has_the_names_of_the_bare_one() -> None:
    compiled = torch.compile(Net(), backend="eager")
    assert isinstance(compiled, nn.Module)
    assert next(iter(compiled.state_dict())).startswith("_orig_mod.")
    assert names_of(as_source(compiled)) == list(Net().state_dict())


@pytest.fixture
def one_rank_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(module, backend="eager"))


def as_peft_wraps(module: nn.Module) -> nn.Module:
    return wrapped(wrapped(module, "model"), "base_model")


WRAPPINGS: list[tuple[Callable[[nn.Module], nn.Module], ...]] = [
    (nn.parallel.DistributedDataParallel,),
    (nn.DataParallel,),
    (nn.parallel.DistributedDataParallel, compiled),
    (compiled, nn.parallel.DistributedDataParallel),
    (as_peft_wraps, nn.parallel.DistributedDataParallel, compiled),
    (as_peft_wraps, compiled, nn.parallel.DistributedDataParallel),
]


@pytest.mark.parametrize(
    "wrappings", WRAPPINGS, ids=lambda wrappings: "_".join(one.__name__ for one in wrappings)
)
@pytest.mark.usefixtures("one_rank_group")
def test_wrappers_in_any_order_leave_the_names_of_the_bare_module(
    wrappings: tuple[Callable[[nn.Module], nn.Module], ...],
) -> None:
    model: nn.Module = Net()
    for wrapping in wrappings:
        model = wrapping(model)
    assert names_of(as_source(model)) == list(Net().state_dict())
    assert [spec.name for spec in Shards(model).specs] == list(Net().state_dict())
    with lw.share_module(model) as shared:
        assert shared.names == list(Net().state_dict())


@pytest.mark.usefixtures("one_rank_group")
def test_a_child_that_is_called_module_keeps_its_name_inside_ddp_and_outside() -> None:
    def model() -> nn.Module:
        return wrapped(nn.Linear(2, 2), "module")

    assert names_of(as_source(model())) == ["module.weight", "module.bias"]
    ddp = nn.parallel.DistributedDataParallel(model())
    assert names_of(as_source(ddp)) == ["module.weight", "module.bias"]


ITERATOR = "iterator"


def by_name(names: Sequence[str], kind: str) -> Source:
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    if kind != ITERATOR:
        return as_source(tensors)
    metadata = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    return IteratorSource(metadata, tensors.items)


def manifest_of(names: Sequence[str]) -> Manifest:
    return Manifest(tensors=tuple(TensorSpec(name=name, dtype=DType.FLOAT32, shape=(2,)) for name in names))


@pytest.mark.parametrize("kind", ["mapping", ITERATOR])
@pytest.mark.parametrize(
    ("offered", "expected", "names"),
    [
        (["module.a", "module.b"], ["a", "b"], ["a", "b"]),
        (["module.module.a"], ["a"], ["a"]),
        (["module.module.a"], ["module.a"], ["module.a"]),
        (["module.a", "module.b"], ["module.a", "c"], ["module.a", "module.b"]),
        (["module.a", "b"], ["a", "b"], ["module.a", "b"]),
        (["module.a"], ["x"], ["module.a"]),
        (["module.a"], None, ["a"]),
        (["module.module.a"], None, ["module.a"]),
    ],
)
def test_names_lose_the_prefix_of_ddp_only_if_all_have_it_and_the_engine_expects_them_without(
    kind: str, offered: list[str], expected: list[str] | None, names: list[str]
) -> None:
    source = for_engines(by_name(offered, kind), None if expected is None else manifest_of(expected))
    assert names_of(source) == names
    given = a_pass(source, source.manifest())
    assert [float(tensor[0]) for tensor in given] == list(range(len(offered)))


def test_no_names_lose_nothing() -> None:
    assert list(without_data_parallel([], {"a"})) == list(without_data_parallel([], None)) == []


def test_the_state_dict_of_ddp_around_peft_loses_both_prefixes() -> None:
    source = as_source({"module.base_model.model.a.base_layer.weight": torch.zeros(2)})
    assert names_of(for_engines(source, manifest_of(["a.weight"]))) == ["a.weight"]


def test_shards_of_a_mapping_lose_the_prefix_of_ddp_for_an_engine_that_expects_that() -> None:
    tensor = torch.zeros(2)
    shards = Shards({"module.a": tensor, "module.b": tensor})
    plan = shards.cut(manifest_of(["a", "b"]))
    assert plan is not None
    assert [spec.names for spec, _ in plan.parts] == [("a", "b")]
    kept = Shards({"module.a": tensor}).cut(manifest_of(["module.a"]))
    assert kept is not None
    assert [spec.name for spec in kept.offered] == ["module.a"]


def test_tied_weights_come_once_under_the_name_registered_first() -> None:
    net = Net()
    net.head.weight = net.embed.weight
    net.stack[1] = net.stack[0]
    manifest = as_source(net).manifest()
    ties = {spec.name: spec.aliases for spec in manifest if spec.aliases}
    assert ties == {
        "embed.weight": ("head.weight",),
        "stack.0.weight": ("stack.1.weight",),
        "stack.0.bias": ("stack.1.bias",),
    }
    assert read(as_source(net))["embed.weight"] is net.embed.weight


def test_only_equal_views_are_tied() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    views = {
        "whole": base,
        "again": base.view(3, 4),
        "transposed": base.t(),
        "flat": base.view(12),
        "bits": base.view(torch.int32),
        "part": base[:2],
        "late": base[1:],
        "empty": base[:0],
        "nothing": base[:0],
    }
    manifest = as_source(views).manifest()
    assert {spec.name: spec.aliases for spec in manifest if spec.aliases} == {"whole": ("again",)}
    assert len(manifest.tensors) == len(views) - 1


def test_a_pass_gives_the_current_values_after_storage_was_exchanged() -> None:
    net = nn.Linear(2, 2)
    source = as_source(net)
    source.manifest()
    net.weight.data = torch.full((2, 2), 7.0)
    net.bias = nn.Parameter(torch.full((2,), 8.0))
    given = read(source)
    assert (given["weight"] == 7).all()
    assert (given["bias"] == 8).all()


def drop_layer(net: Net) -> None:
    del net.stack[1]


def exchange_layer(net: Net) -> None:
    net.stack[1] = nn.Linear(4, 4)


def add_parameter(net: Net) -> None:
    net.extra = nn.Parameter(torch.zeros(1))


def drop_parameter(net: Net) -> None:
    net.scale = None  # type: ignore[assignment]


def fill_buffer(net: Net) -> None:
    net.later = torch.zeros(2)


def untie(net: Net) -> None:
    net.head.weight = nn.Parameter(net.head.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_layer, "stack"),
        (exchange_layer, "stack"),
        (add_parameter, "itself"),
        (drop_parameter, "scale"),
        (fill_buffer, "later"),
        (untie, "head.weight"),
    ],
)
def test_a_module_that_changed_since_its_manifest_is_refused(
    change: Callable[[Net], None], named: str
) -> None:
    net = Net()
    net.head.weight = net.embed.weight
    source = as_source(net)
    manifest = source.manifest()
    a_pass(source, manifest)
    change(net)
    with pytest.raises(ManifestInvalid, match=named):
        a_pass(source, manifest)
    if change is not drop_layer:
        assert len(read(source)) > 0  # a new manifest follows the new module


class Adapted(nn.Module):
    """A layer as PEFT wraps it."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1)})
        self.lora_embedding_A = nn.ParameterDict({})
        self.merged = False


def test_an_adapter_in_a_module_is_refused_until_it_is_merged_and_again_after_it_was_unmerged() -> None:
    layer = Adapted()
    source = as_source(wrapped(wrapped(wrapped(layer, "q"), "model"), "base_model"))
    with pytest.raises(ManifestInvalid, match=r"lora_A.*merge_adapter"):
        source.manifest()
    layer.merged = True
    manifest = source.manifest()
    assert [spec.name for spec in manifest] == ["q.weight", "q.bias"]
    layer.merged = False
    with pytest.raises(ManifestInvalid, match="merge_adapter"):
        a_pass(source, manifest)


# What cannot be published.


def tensor_of(dtype: torch.dtype) -> Tensor:
    return torch.zeros(3, 2).to(dtype)


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.value)
def test_every_dtype_has_a_torch_dtype_of_the_same_name_and_size(dtype: DType) -> None:
    theirs = torch_dtypes()[dtype]
    assert str(theirs) == f"torch.{dtype.value}"
    assert theirs.itemsize == dtype.size_bytes
    assert as_source({"w": tensor_of(theirs)}).manifest().tensors[0].dtype is dtype


class Shell(Tensor):
    """A tensor whose bytes are elsewhere."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None


UNREADABLE: dict[str, tuple[Callable[[], object], str]] = {
    "complex": (lambda: torch.zeros(2, dtype=torch.complex64), "complex64"),
    "sparse": (lambda: torch.zeros(2, 2).to_sparse(), "sparse_coo"),
    "meta": (lambda: torch.zeros(2, device="meta"), "meta device"),
    "lazy": (lambda: nn.LazyLinear(3).weight, "not initialised"),
    "subclass": (lambda: torch.zeros(2).as_subclass(Shell), "Shell"),
    "no tensor": (lambda: b"state", "bytes"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_has_no_plain_bytes_is_refused_by_name(case: str) -> None:
    make, reason = UNREADABLE[case]
    with pytest.raises(ManifestInvalid, match=f"x.y .*{reason}"):
        as_source({"x.y": make()}).manifest()


def test_a_dtensor_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)))
        with pytest.raises(
            ManifestInvalid, match=r"w is a DTensor.*make a publisher on every rank and pass group="
        ):
            as_source({"w": sharded}).manifest()
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("given", [None, 3, [torch.zeros(1)], object()])
def test_what_is_no_source_is_refused_with_what_could_be_one(given: object) -> None:
    with pytest.raises(Refused, match=f"checkpoint directory.*{type(given).__qualname__}"):
        as_source(given)


def test_each_kind_of_object_becomes_its_source(tmp_path: Path) -> None:
    assert isinstance(as_source(nn.Linear(1, 1)), ModuleSource)
    assert isinstance(as_source(nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))})), ModuleSource)
    assert isinstance(as_source({}), StateDictSource)
    assert isinstance(as_source(tmp_path), CheckpointSource)
    assert isinstance(as_source(str(tmp_path)), CheckpointSource)
    source = IteratorSource([("a", "float32", (1,))], list)
    assert as_source(source) is source


def test_importing_the_sources_does_not_import_torch() -> None:
    modules = [
        "checkpoint",
        "trainer.offers.freeze",
        "trainer.offers.live",
        "trainer.sources.source",
        "trainer.sources.in_memory",
    ]
    code = f"import sys; {'; '.join(f'import liveweight.{m}' for m in modules)}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, check=True, timeout=60)


# State dicts and iterators.


def test_a_state_dict_whose_names_changed_since_its_manifest_is_refused() -> None:
    tensors = {"a": torch.zeros(1), "b": torch.zeros(1)}
    source = as_source(tensors)
    manifest = source.manifest()
    tensors["c"] = torch.zeros(1)
    with pytest.raises(ManifestInvalid, match="c"):
        a_pass(source, manifest)


def test_a_state_dict_without_tensors_is_refused() -> None:
    with pytest.raises(ManifestInvalid, match="without tensors"):
        as_source({}).manifest()


META: list[Any] = [
    ("a", torch.float32, (2,)),
    ("b", DType.INT8, torch.Size([1])),
    ("c", "torch.bfloat16", ()),
]


def given() -> list[tuple[str, Tensor]]:
    return [
        ("a", torch.zeros(2)),
        ("b", tensor_of(torch.int8)[0, :1]),
        ("c", torch.zeros((), dtype=torch.bfloat16)),
    ]


def test_an_iterator_gives_a_new_pass_each_time() -> None:
    source = IteratorSource(
        [*META, TensorSpec(name="d", dtype=DType.BOOL, shape=(1,), digest="0" * 32)],
        lambda: [*given(), ("d", torch.tensor([True]))],
    )
    assert list(read(source)) == list(read(source)) == ["a", "b", "c", "d"]
    assert source.manifest().digest() is None
    assert not source.held


def exchanged(tensors: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [tensors[1], tensors[0], *tensors[2:]]


DISAGREEMENTS: dict[str, tuple[Callable[[list[tuple[str, Tensor]]], object], str]] = {
    "missing": (lambda ts: ts[:2], "ended before c"),
    "extra": (lambda ts: [*ts, ("d", torch.zeros(1))], "d, which its manifest does not list"),
    "renamed": (lambda ts: [("z", ts[0][1]), *ts[1:]], "z, which its manifest does not list"),
    "twice": (lambda ts: [ts[0], ts[0], *ts[1:]], "a twice"),
    "order": (exchanged, "b where its manifest lists a"),
    "dtype": (lambda ts: [("a", torch.zeros(2).half()), *ts[1:]], r"a: .*float32\[2\].*float16\[2\]"),
    "shape": (lambda ts: [("a", torch.zeros(1, 2)), *ts[1:]], r"a: .*float32\[2\].*float32\[1, 2\]"),
    "kind": (lambda ts: [("a", [0.0, 0.0]), *ts[1:]], "a is not a tensor but list"),
}


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_metadata_and_iteration_that_disagree_are_refused_by_name(case: str, held: bool) -> None:
    change, message = DISAGREEMENTS[case]
    source = IteratorSource(META, lambda: change(given()))  # type: ignore[arg-type,return-value]
    source.held = held
    with pytest.raises(ManifestInvalid, match=message):
        read(source)


@pytest.mark.parametrize("held", [False, True])
def test_an_error_inside_an_iterator_comes_out_with_the_tensors_name(held: bool) -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield given()[0]
        raise RuntimeError("gather failed")

    source = IteratorSource(META, broken)
    source.held = held
    with pytest.raises(Unavailable, match="asked for b: RuntimeError: gather failed") as caught:
        read(source)
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "meta", [[("a", "float7", (1,))], [("a", torch.complex64, (1,))], [("a", "int8", (1,))] * 2, []]
)
def test_metadata_that_cannot_be_is_refused(meta: list[Any]) -> None:
    with pytest.raises(ManifestInvalid):
        IteratorSource(meta, list)


def test_a_pass_holds_no_tensor_while_it_asks_for_the_next() -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []

    def made() -> Iterator[tuple[str, Tensor]]:
        for number in range(5):
            gc.collect()
            counts.append(len(alive))
            tensor = torch.zeros(1)
            alive.add(tensor)
            pair = (str(number), tensor)
            del tensor
            yield pair
            del pair

    source = IteratorSource([(str(number), "float32", (1,)) for number in range(5)], made)
    for tensor in one_pass(source, names_of(source)):
        del tensor
    assert counts == [0] * 5


# Checkpoint directories.


def tensors_of_every_dtype() -> dict[str, Tensor]:
    plain = {f"model.{dtype.value}.weight": tensor_of(theirs) for dtype, theirs in torch_dtypes().items()}
    return {**plain, "model.scalar": torch.tensor(1.5), "_orig_mod.model.empty": torch.zeros(0, 3)}


def write_sharded(directory: Path, shards: dict[str, dict[str, Tensor]]) -> dict[str, str]:
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def sharded(directory: Path) -> dict[str, str]:
    shards = {"model-1.safetensors": {"a": torch.zeros(4)}, "model-2.safetensors": {"b": torch.ones(2, 2)}}
    return write_sharded(directory, shards)


@pytest.mark.parametrize("files", [1, 2, 5])
def test_a_checkpoint_directory_gives_every_tensor_of_its_shards(tmp_path: Path, files: int) -> None:
    tensors = tensors_of_every_dtype()
    names = list(tensors)
    if files == 1:
        save_file(tensors, tmp_path / SINGLE)
    else:
        parts = {f"model-{i}.safetensors": {n: tensors[n] for n in names[i::files]} for i in range(files)}
        write_sharded(tmp_path, parts)
    source = as_source(tmp_path)
    read_back = read(source)
    assert sorted(read_back) == sorted(clean(name) for name in names)
    for name in names:
        there = read_back[clean(name)]
        assert there.dtype == tensors[name].dtype
        assert torch.equal(there.reshape(-1).view(torch.uint8), tensors[name].reshape(-1).view(torch.uint8))
    assert names_of(source) == list(read_back)


def test_a_checkpoints_bytes_are_mapped_and_not_read_ahead(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1000), "b": torch.ones(1000)}, tmp_path / SINGLE)
    given = read(as_source(tmp_path))
    assert str(tmp_path / SINGLE) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert (given["b"] == 1).all()


def truncate(directory: Path) -> None:
    file = directory / "model-2.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def remove_shard(directory: Path) -> None:
    (directory / "model-2.safetensors").unlink()


def overwrite(directory: Path) -> None:
    (directory / "model-2.safetensors").write_bytes(b"\xff" * 64)


def index_names_one_more(directory: Path) -> None:
    write_index(directory, {**sharded(directory), "gone": "model-2.safetensors"})


def index_names_one_less(directory: Path) -> None:
    save_file({"b": torch.ones(2, 2), "more": torch.zeros(1)}, directory / "model-2.safetensors")


def index_says_another_file(directory: Path) -> None:
    save_file({"a": torch.zeros(4), "c": torch.zeros(1)}, directory / "model-1.safetensors")
    write_index(
        directory, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    )


def one_name_in_two_shards(directory: Path) -> None:
    save_file({"a": torch.zeros(4), "b": torch.ones(2, 2)}, directory / "model-2.safetensors")


def both_forms(directory: Path) -> None:
    save_file({"a": torch.zeros(4)}, directory / SINGLE)


def no_index(directory: Path) -> None:
    (directory / INDEX).unlink()


def garbled_index(directory: Path) -> None:
    (directory / INDEX).write_text("{")


def index_without_map(directory: Path) -> None:
    (directory / INDEX).write_text("{}")


def index_leads_outside(directory: Path) -> None:
    write_index(directory, {"a": "../model-1.safetensors"})


def unknown_dtype(directory: Path) -> None:
    save_file({"b": torch.zeros(2, dtype=torch.complex64)}, directory / "model-2.safetensors")


CORRUPTIONS: dict[Callable[[Path], None], tuple[str, ...]] = {
    truncate: ("model-2.safetensors",),
    remove_shard: ("model-2.safetensors",),
    overwrite: ("model-2.safetensors",),
    index_names_one_more: ("gone", "model-2.safetensors"),
    index_names_one_less: ("more", "model-2.safetensors", INDEX),
    index_says_another_file: ("c", "model-1.safetensors", "model-2.safetensors"),
    one_name_in_two_shards: ("a", "model-1.safetensors", "model-2.safetensors"),
    both_forms: (SINGLE, INDEX),
    no_index: (SINGLE, INDEX),
    garbled_index: (INDEX,),
    index_without_map: (INDEX, "weight_map"),
    index_leads_outside: ("a", "../model-1.safetensors"),
    unknown_dtype: ("b", "C64", "model-2.safetensors"),
}


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_a_corrupt_directory_is_refused_by_file_and_tensor_before_a_byte_is_offered(
    tmp_path: Path, corrupt: Callable[[Path], None]
) -> None:
    sharded(tmp_path)
    corrupt(tmp_path)
    with pytest.raises(ManifestInvalid) as caught:
        as_source(tmp_path).manifest()
    assert [word for word in CORRUPTIONS[corrupt] if word not in str(caught.value)] == []


def test_a_path_that_is_no_directory_is_refused() -> None:
    with pytest.raises(ManifestInvalid, match="org/model is not a directory"):
        as_source("org/model").manifest()


@pytest.mark.parametrize("corrupt", [truncate, remove_shard], ids=lambda corrupt: corrupt.__name__)
def test_a_directory_that_is_damaged_after_its_manifest_is_refused_by_file(
    tmp_path: Path, corrupt: Callable[[Path], None]
) -> None:
    sharded(tmp_path)
    source = as_source(tmp_path)
    manifest = source.manifest()
    corrupt(tmp_path)
    with pytest.raises(ManifestInvalid, match=r"model-2\.safetensors"):
        a_pass(source, manifest)


def test_a_tensor_that_left_its_file_after_the_manifest_is_named(tmp_path: Path) -> None:
    sharded(tmp_path)
    source = as_source(tmp_path)
    manifest = source.manifest()
    save_file({"other": torch.zeros(1)}, tmp_path / "model-2.safetensors")
    with pytest.raises(LiveWeightError, match=r"model-2\.safetensors.*\bb\b"):
        a_pass(source, manifest)


def test_a_checkpoint_comes_in_the_same_order_on_every_machine(tmp_path: Path) -> None:
    shards = {
        "z.safetensors": {"b": torch.zeros(1), "a": torch.zeros(9)},
        "a.safetensors": {"c": torch.zeros(1)},
    }
    write_sharded(tmp_path, shards)
    assert names_of(as_source(tmp_path)) == ["a", "b", "c"]
    assert isinstance(as_source(tmp_path).manifest(), Manifest)
