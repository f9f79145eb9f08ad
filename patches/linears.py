"""Linear layers with a second copy of their weights, in the layout that oneDNN multiplies by.

`torch.nn.functional.linear` hands plain weights to a BLAS that has to rearrange them at every call, or is slow on CPUs
of another make. `pack_linears` rearranges them once, where that is measured to be faster.

A packed layer is a `PackedLinear`, with the same parameters. It multiplies by the copy only while that is sure to be of
the weight as it is now, and where a bare call of an operator without derivatives gives what `linear` gives; otherwise
it does as any `torch.nn.Linear`. The plain weight stays, although the copy holds every bit of it: a parameter without
its values loses edits in place without a word (on the meta device), or ends the process (where its memory was freed).
"""

from __future__ import annotations

import bisect
import copyreg
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from hf_paged.pool import free_memory, parse_memory

ROW_COUNTS = (1, 2, 16, 64, 256)
"""Rows of input at which both ways are timed. One row is a case by itself: a matrix times a vector."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_FRACTION = 0.5
"""Of the memory that is free, for the copies."""

_PACKED = "_hf_paged_packed"
"""Attribute of a PackedLinear: its `_Packed`, while it has one."""
_SAMPLES = 8
"""Values of a weight that every call compares, since torch does not count writes through `.data`."""
_TIMED_BYTES = 64 << 20  # of a shape's weights, which take turns: in a model they come from memory, not from a cache
_SECONDS_A_COUNT = 0.04
_ROUNDS = (3, 20)  # at least and at most
_CALLS = 4  # of each way in a round, where they are short
_LONGEST_CALL = 0.02  # seconds of a plain multiplication; with more rows than take so long nothing is timed


@dataclass(frozen=True)
class ShapeSpeed:
    """What was measured for weights of one shape and dtype."""

    out_features: int
    in_features: int
    dtype: str
    layers: int
    """Linear layers with such a weight."""
    packed: int
    """How many of them are packed."""
    plain_seconds: Mapping[int, float]
    """By rows of input: one multiplication by the plain weight."""
    packed_seconds: Mapping[int, float]
    """The same by the packed one."""
    used_at: tuple[int, ...]
    """The measured row counts at which packed is used. Between two of them it is used if it is at both, and above the
    last as at the last."""

    @property
    def speedups(self) -> dict[int, float]:
        """By rows of input: how many times faster packed is; over 1 means faster."""
        return {rows: seconds / self.packed_seconds[rows] for rows, seconds in self.plain_seconds.items()}

    def helps(self, rows: int) -> bool:
        """Whether packed is used for an input of so many rows."""
        counts = tuple(self.plain_seconds)
        place = bisect.bisect_left(counts, rows)
        around = counts[max(place - 1, 0) : place + 1] if place == len(counts) or counts[place] != rows else (rows,)
        return all(count in self.used_at for count in around)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict, for JSON."""
        return {
            "out_features": self.out_features,
            "in_features": self.in_features,
            "dtype": self.dtype,
            "layers": self.layers,
            "packed": self.packed,
            "plain_seconds": dict(self.plain_seconds),
            "packed_seconds": dict(self.packed_seconds),
            "speedups": self.speedups,
            "used_at": list(self.used_at),
        }


@dataclass(frozen=True)
class PackReport:
    """What `pack_linears` did."""

    shapes: tuple[ShapeSpeed, ...]
    """The shapes that were measured, packed or not."""
    left: Mapping[str, int]
    """Linear layers that stay as they are, by the reason."""
    extra_bytes: int
    """Memory of the packed copies, beside the plain weights."""
    seconds: float
    """What packing took, measuring included."""

    @property
    def packed(self) -> int:
        """Linear layers that are packed."""
        return sum(shape.packed for shape in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """The same as a dict, for JSON."""
        return {
            "packed": self.packed,
            "left": dict(self.left),
            "extra_bytes": self.extra_bytes,
            "seconds": self.seconds,
            "shapes": [shape.as_dict() for shape in self.shapes],
        }

    def __repr__(self) -> str:
        lines = [
            f"{self.packed} linear layers packed in {self.seconds:.1f} s; {self.extra_bytes / 2**20:,.1f} MiB more"
        ]
        for shape in self.shapes:
            speeds = ", ".join(
                f"{speed:.2f} with {rows}{'' if rows in shape.used_at else ' (not used)'}"
                for rows, speed in shape.speedups.items()
            )
            size = f"{shape.out_features} x {shape.in_features} {shape.dtype}"
            lines.append(f"  {size}: {shape.packed} of {shape.layers} packed; times as fast, by rows: {speeds}")
        lines += [f"  {count} left as they are: {reason}" for reason, count in self.left.items()]
        return "\n".join(lines)


class PackedLinear(torch.nn.Linear):
    """A linear layer that `pack_linears` has taken over. Its copies, also pickled ones, are plain linear layers."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., in_features]` to `[..., out_features]`."""
        # Through vars(), since a library may call this after the layer has become a plain one again.
        packed = vars(self).get(_PACKED)
        if packed is None:
            return linear(input, self.weight, self.bias)
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if torch.compiler.is_compiling():
            if _suits_graph(input, weight, bias):
                return torch.ops.hf_paged.linear(input, weight, bias)
        elif torch._C._get_tracing_state() is not None:
            pass  # what is recorded would be this call's answers
        elif not packed.is_of(weight):
            vars(self).pop(_PACKED, None)  # it was changed: free the copy
        elif packed.serves(input, weight, bias):
            return _multiply(input, packed.tensor, bias, "none", [], "")
        return linear(input, self.weight, self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        with _kept_if_unchanged(self):
            return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with _kept_if_unchanged(self):
            super()._load_from_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != _PACKED}
        kind = torch.nn.Linear if type(self) is PackedLinear else type(self)
        # Not __newobj__, for which pickle wants the class of the object itself.
        return copyreg._reconstructor, (kind, object, None), state  # type: ignore[attr-defined]


@dataclass(eq=False)
class _Packed:
    """The packed copy of one weight, and how to know that it still is one."""

    tensor: Tensor
    """Opaque: `[out_features, in_features]`."""
    speed: ShapeSpeed
    shape: torch.Size
    dtype: torch.dtype
    address: int
    version: int
    sample: Any
    """The weight's own memory, a few values of it: a numpy array, which costs a tenth of a tensor to compare."""
    values: bytes
    always: bool = False

    @classmethod
    def of(cls, weight: Tensor, tensor: Tensor, speed: ShapeSpeed) -> _Packed:
        # A stride that is a multiple of no row's length: the values are of several columns.
        sample = _bits(weight).view(-1).numpy()[:: max(1, (weight.numel() - 1) // (_SAMPLES - 1))]
        return cls(
            tensor,
            speed,
            weight.shape,
            weight.dtype,
            weight.data_ptr(),
            weight._version,
            sample,
            sample.tobytes(),
            always=len(speed.used_at) == len(speed.plain_seconds),
        )

    def is_of(self, weight: Tensor | None) -> bool:
        """Whether `weight` is as it was when it was packed. The address comes first: only there may we look."""
        return (
            type(weight) in (torch.nn.Parameter, Tensor)
            and weight.data_ptr() == self.address
            and weight.shape == self.shape
            and weight.is_contiguous()
            and weight._version == self.version
            and self.sample.tobytes() == self.values
        )

    def holds(self, weight: Tensor) -> bool:
        """Whether every bit of the copy is the weight's."""
        return torch.equal(_bits(self.tensor.to_dense()), _bits(weight))

    def serves(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether the packed multiplication gives what `linear` does, and is faster."""
        if (
            type(input) is not Tensor
            or input.dtype is not self.dtype
            or not input.is_cpu
            or input.layout is not torch.strided
            or input.shape[-1:] != self.shape[1:]
        ):
            return False
        rows = input.numel() // self.shape[1]
        return (
            rows > 0
            and (self.always or self.speed.helps(rows))
            and (bias is None or bias.dtype is self.dtype)
            and not (_wants_grad(input, weight, bias) or _is_watched())
        )


def _bits(weight: Tensor) -> Tensor:
    return weight.detach().view(torch.int32 if weight.element_size() == 4 else torch.int16)


def _wants_grad(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )


def _is_watched() -> bool:
    """Whether something goes on between torch's functions and operators that an operator of oneDNN would miss."""
    return (
        torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


# In graphs ------------------------------------------------------------------------------------------------------------

_by_address: weakref.WeakValueDictionary[int, _Packed] = weakref.WeakValueDictionary()
"""Where the operator finds the copy of the weight that it is given. The layers keep it alive."""


def _suits_graph(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the operator may stand in a graph; it sees for itself, at each call, whether the copy serves."""
    return (
        weight is not None
        and not torch.compiler.is_exporting()
        and input.device.type == "cpu"
        and input.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
        and not _wants_grad(input, weight, bias)
    )


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    packed = _by_address.get(weight.data_ptr())
    if packed is not None and packed.is_of(weight) and packed.serves(input, weight, bias):
        return _multiply(input, packed.tensor, bias, "none", [], "")
    return linear(input, weight, bias)


def _fake_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


_library = torch.library.Library("hf_paged", "FRAGMENT")
_library.define("linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("hf_paged::linear", _fake_linear, lib=_library)

_multiply = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
if _multiply is not None and _reorder is not None:
    _multiply, _reorder = _multiply.default, _reorder.default


# Switching over and back ----------------------------------------------------------------------------------------------


def pack_linears(
    model: torch.nn.Module, *, max_memory: int | float | str | None = None, min_speedup: float = 1.05
) -> PackReport:
    """Give the linear layers of a model packed copies of their weights, where that is faster on this machine.

    For inference on a CPU, with any cache or none. Each shape and dtype of weights is timed, with as many threads as
    torch has now: pack on a quiet machine. Packing again packs what is not packed, or no longer as it was.

    A copy is used only while its weight is as it was: after `load_state_dict`, `to(dtype)`, an optimizer's step or any
    other write that torch counts, the layer is plain until it is packed again. Writes through `.data` or numpy are
    noticed where they change one of 8 values of a weight that every call looks at; pack again after such an edit of few
    values. Layers are plain, too, where gradients are wanted of a weight or an input, under autocast, and within
    torch's function transforms.

    Args:
        model: any module. Layers of its that are exactly `torch.nn.Linear`, on a CPU and in float32, bfloat16 or (where
            the CPU has it) float16, are packed; others are left as they are, and counted in the report.
        max_memory: for the copies: bytes, a string such as `"4GiB"`, or a fraction (a float up to 1.0) of the memory
            that is free now; half of it by default. Shapes that gain most for their size are packed first.
        min_speedup: how many times faster packed must be to be used, at each row count. 0 packs whatever can be.

    Returns:
        What was packed, what was measured, and what it takes.

    Raises:
        TypeError: `model` is no module.
        ValueError: `max_memory` is not understood, or `min_speedup` is negative.
        NotImplementedError: the model has PEFT adapters.
    """
    began = time.perf_counter()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"pack_linears takes a torch.nn.Module, not {type(model).__name__}")
    if min_speedup < 0:
        raise ValueError(f"min_speedup must not be negative, not {min_speedup!r}")
    budget = parse_memory(max_memory)
    _refuse_adapters(model)
    left: Counter[str] = Counter()
    groups = _find_groups(model, left)
    held = _held_bytes(groups)
    if not isinstance(budget, int):
        budget = int((free_memory(torch.device("cpu")) + held) * (budget or DEFAULT_FRACTION))
    budget -= held
    with torch.no_grad():
        for group in groups:
            group.measure(budget, left)
        groups.sort(key=lambda group: group.gain, reverse=True)
        for group in groups:
            budget = group.pack(budget, min_speedup, left)
    for group in groups:
        group.switch()
    return PackReport(
        shapes=tuple(group.speed for group in groups if group.speed is not None),
        left=dict(left),
        extra_bytes=_held_bytes(groups),
        seconds=time.perf_counter() - began,
    )


def unpack_linears(model: torch.nn.Module) -> torch.nn.Module:
    """Undo `pack_linears`: every layer is a `torch.nn.Linear` again. Harmless on a model that is not packed.

    Returns:
        The same model.
    """
    for module in model.modules():
        if isinstance(module, PackedLinear):
            _make_plain(module)
    return model


@contextmanager
def packed_linears(
    model: torch.nn.Module, *, max_memory: int | float | str | None = None, min_speedup: float = 1.05
) -> Iterator[PackReport]:
    """`with packed_linears(model) as report:` packs within, and unpacks at the end, also after an exception. A model
    that had packed layers before stays packed. Arguments as for `pack_linears`."""
    had_packed_layers = has_packed_linears(model)
    report = pack_linears(model, max_memory=max_memory, min_speedup=min_speedup)
    try:
        yield report
    finally:
        if not had_packed_layers:
            unpack_linears(model)


def has_packed_linears(model: torch.nn.Module) -> bool:
    """Whether some layer of a model was switched over by `pack_linears`."""
    return any(isinstance(module, PackedLinear) for module in model.modules())


@dataclass
class _Group:
    """The layers of a model with weights of one shape and dtype."""

    shape: torch.Size
    dtype: torch.dtype
    layers: dict[int, list[torch.nn.Linear]] = field(default_factory=dict)
    """By weight, those that share it."""
    packed: dict[int, _Packed] = field(default_factory=dict)
    """By weight, its copy."""
    speed: ShapeSpeed | None = None

    @property
    def size(self) -> int:
        """Layers in the group."""
        return sum(map(len, self.layers.values()))

    @property
    def nbytes(self) -> int:
        """Of one weight."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def gain(self) -> float:
        """Seconds that packing a byte saves in a step of few rows."""
        if self.speed is None:
            return 0.0
        rows = next(iter(self.speed.plain_seconds))
        return (self.speed.plain_seconds[rows] - self.speed.packed_seconds[rows]) / self.nbytes

    def weight(self, key: int) -> Tensor:
        return self.layers[key][0].weight

    def measure(self, budget: int, left: Counter[str]) -> None:
        """Find out how much faster packed weights are, unless some are packed already and known to be at all counts."""
        for packed in self.packed.values():
            if packed.always:
                self.speed = packed.speed
                return
        if self.nbytes > budget:
            left["no room for a copy in max_memory"] += self.size
            return
        sample = list(self.layers)[: max(1, min(_TIMED_BYTES, budget) // self.nbytes)]
        try:
            pairs = [(weight, _reorder(weight)) for weight in map(self.weight, sample)]
            seconds = _time(pairs)
        except RuntimeError:
            left[f"oneDNN has no packed form for {_name(self.dtype)} on this CPU"] += self.size
            return
        plain, packed = ({rows: pair[way] for rows, pair in seconds.items()} for way in (0, 1))
        self.speed = ShapeSpeed(*self.shape, _name(self.dtype), self.size, 0, plain, packed, ())

    def pack(self, budget: int, min_speedup: float, left: Counter[str]) -> int:
        """Make the copies that help and that there is room for. Returns what is left of the budget."""
        if self.speed is None:
            return budget
        used_at = tuple(rows for rows, speedup in self.speed.speedups.items() if speedup >= min_speedup)
        if not used_at:
            left["packing was not faster"] += self.size
        tensors: dict[int, Tensor] = {key: packed.tensor for key, packed in self.packed.items() if used_at}
        for key, layers in self.layers.items():
            if key not in tensors and used_at:
                if self.nbytes > budget:
                    left["no room for a copy in max_memory"] += len(layers)
                    continue
                tensors[key] = _reorder(self.weight(key))
                budget -= tensors[key].nbytes
        count = sum(len(self.layers[key]) for key in tensors)
        self.speed = replace(self.speed, layers=self.size, packed=count, used_at=used_at)
        self.packed = {key: _Packed.of(self.weight(key), tensor, self.speed) for key, tensor in tensors.items()}
        return budget

    def switch(self) -> None:
        """Let the layers have their copies."""
        for key, layers in self.layers.items():
            packed = self.packed.get(key)
            for layer in layers:
                if packed is None:
                    _make_plain(layer)
                else:
                    vars(layer)[_PACKED] = packed
                    layer.__class__ = PackedLinear
            if packed is not None:
                _by_address[packed.address] = packed


def _held_bytes(groups: Sequence[_Group]) -> int:
    return sum(packed.tensor.nbytes for group in groups for packed in group.packed.values())


def _find_groups(model: torch.nn.Module, left: Counter[str]) -> list[_Group]:
    """The layers that may be packed; those that may not are counted in `left`."""
    groups: dict[tuple[torch.Size, torch.dtype], _Group] = {}
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        if (reason := _why_not(module)) is not None:
            left[reason] += 1
            continue
        weight = module.weight
        group = groups.setdefault((weight.shape, weight.dtype), _Group(weight.shape, weight.dtype))
        group.layers.setdefault(id(weight), []).append(module)
        packed = vars(module).get(_PACKED)
        if packed is not None and packed.is_of(weight) and packed.holds(weight):
            group.packed[id(weight)] = packed
    return list(groups.values())


def _why_not(module: torch.nn.Module) -> str | None:
    if _multiply is None or _reorder is None or not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if type(module) not in (torch.nn.Linear, PackedLinear):
        return f"{type(module).__name__}, which is no plain torch.nn.Linear"
    if "forward" in vars(module):
        return "another library has given it a forward"
    weight = module._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter or weight.layout is not torch.strided:
        return "its weight is computed, or of a type of its own"
    if weight.device.type != "cpu":
        return f"on {weight.device.type}"
    if weight.dtype not in DTYPES:
        return _name(weight.dtype)
    if weight.is_inference():
        return "made under torch.inference_mode, where torch counts no writes"
    if not weight.is_contiguous() or not weight.numel():
        return "its weight is empty or not contiguous"
    return None


def _refuse_adapters(model: torch.nn.Module) -> None:
    for module in model.modules():
        if any(kind.__module__.partition(".")[0] == "peft" for kind in type(module).__mro__):
            raise NotImplementedError(
                f"the model has PEFT adapters ({type(module).__name__}), and merging them later writes to the weights "
                "without torch counting it. Merge them first, model = model.merge_and_unload(), and pack that"
            )


def _make_plain(module: torch.nn.Module) -> None:
    vars(module).pop(_PACKED, None)
    if type(module) is PackedLinear:  # no class that torch has derived from it meanwhile
        module.__class__ = torch.nn.Linear


@contextmanager
def _kept_if_unchanged(layer: PackedLinear) -> Iterator[None]:
    """Within, the layer may change its weight."""
    packed = vars(layer).pop(_PACKED, None)
    try:
        yield
    finally:
        if packed is not None and packed.is_of(layer._parameters.get("weight")):
            vars(layer)[_PACKED] = packed


def _time(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[int, tuple[float, float]]:
    """By rows: the seconds of a plain and of a packed multiplication.

    The two ways take turns, a few calls each, as in a model calls of one way follow one another: threads that the other
    way has left spinning would slow down the first. Of the calls the lower quartile counts: what else the machine does
    makes many longer, and a weight that happens to lie in a cache makes a few shorter.

    Args:
        pairs: plain and packed weights of one shape, which take turns, too.
    """
    found: dict[int, tuple[float, float]] = {}
    weight, tensor = pairs[0]
    turns = itertools.cycle(pairs)
    for rows in ROW_COUNTS:
        if found and found[max(found)][0] > _LONGEST_CALL:
            break
        input = torch.randn(rows, weight.shape[1]).to(weight.dtype)
        _seconds(_run_packed, input, tensor)
        calls = _CALLS if _seconds(linear, input, weight) < _SECONDS_A_COUNT / 20 else 1
        plain: list[float] = []
        packed: list[float] = []
        began = time.perf_counter()
        for count in range(_ROUNDS[1]):
            if count >= _ROUNDS[0] and time.perf_counter() - began > _SECONDS_A_COUNT:
                break
            some = list(itertools.islice(turns, calls))
            plain += [_seconds(linear, input, weight) for weight, _ in some]
            packed += [_seconds(_run_packed, input, tensor) for _, tensor in some]
        found[rows] = sorted(plain)[len(plain) // 4], sorted(packed)[len(packed) // 4]
    return found


def _run_packed(input: Tensor, tensor: Tensor) -> Tensor:
    return _multiply(input, tensor, None, "none", [], "")


def _seconds(way: Callable[[Tensor, Tensor], Tensor], input: Tensor, weight: Tensor) -> float:
    began = time.perf_counter()
    way(input, weight)
    return time.perf_counter() - began


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
