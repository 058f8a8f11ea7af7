"""Tensors that say ``cuda:0``, and the operators of torch on them.

    DeviceTensor    for torch a tensor on "meta" with another device: shapes, strides, no bytes
      .mem          the same tensor on the host, over the bytes of the card

An operator's outputs get shapes from the meta device and memory from the allocator at once; its computation
is work for the stream. Views are made at once. An operator that mixes devices raises, as on CUDA. Operators
whose shapes follow from values, and those that bring values home, wait for the stream.

A tensor on "meta" that an operator makes by the options of a ``DeviceTensor`` is a ``DeviceTensor`` too. A
wrapper that is on "cuda" for torch as well would end in its device guards, which this build has not got.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.emulated_gpu.allocator import poison
from tests.emulated_gpu.card import Card, Storage
from tests.emulated_gpu.streams import Span, span_of

A = torch.ops.aten
COPY, TO = A.copy_.default, A._to_copy.default
SHAPES_BY_VALUE = {
    A.nonzero.default,
    A.masked_select.default,
    A._unique2.default,
    A.unique_dim.default,
    A.unique_consecutive.default,
    A.bincount.default,
    A.repeat_interleave.Tensor,
}
TO_PYTHON = {A._local_scalar_dense.default, A.equal.default, A.is_nonzero.default}
BY_INDEX = {A.index.Tensor, A.index_put_.default, A.index_put.default, A._index_put_impl_.default}
BY_ROW = {A.index_select.out, A.index_copy_.default, A.index_fill_.int_Scalar, A.index_add_.default}
"""(tensor, dim, index, ...): some rows of the first are read or written."""
PRODUCTS = {
    A.mm.default,
    A.addmm.default,
    A.bmm.default,
    A.baddbmm.default,
    A.mm.out,
    A.addmm.out,
    A.bmm.out,
    A._int_mm.default,
    A._scaled_mm.default,
    A.mv.default,
    A.addmv.default,
    A.dot.default,
}
ALIASES = {A._unsafe_view.default, A.lift_fresh.default, A.lift.default, A._reshape_alias.default}

_card: Card | None = None


def card() -> Card:
    assert _card is not None, "no card is emulated"
    return _card


def use_card(one: Card | None) -> None:
    global _card
    _card = one


class DeviceStorage:
    """``untyped_storage()`` of a ``DeviceTensor``."""

    def __init__(self, storage: Storage) -> None:
        self.device = storage.card.device
        self.storage = storage
        self._cdata = id(storage)

    def nbytes(self) -> int:
        return self.storage.size

    def data_ptr(self) -> int:
        return 0 if self.storage.block is None else self.storage.block.address

    def resize_(self, size: int) -> None:
        self.storage.resize(size)


class DeviceTensor(torch.Tensor):
    """``mem``: over ``storage``."""

    storage: Storage
    _mem: torch.Tensor
    _generation: int
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, mem: torch.Tensor, storage: Storage) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, mem.size(), strides=mem.stride(), storage_offset=0, dtype=mem.dtype, device="meta"
        )
        made._mem, made.storage, made._generation = mem, storage, storage.generation
        made._offset = 0 if storage.block is None else mem.data_ptr() - storage.block.address
        return made

    def __init__(self, mem: torch.Tensor, storage: Storage) -> None:
        pass

    _offset: int

    @property
    def mem(self) -> torch.Tensor:
        if self._generation != self.storage.generation:
            self._generation = self.storage.generation
            self._mem = _view_of(self.storage, self.dtype, self.size(), self.stride(), self._offset)
        return self._mem

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.storage.card.device

    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.mem.data_ptr()

    def storage_offset(self) -> int:
        return self._offset // self.itemsize

    def get_device(self) -> int:
        return int(self.device.index)

    def is_pinned(self, *_: Any) -> bool:
        return False

    def untyped_storage(self) -> Any:
        return DeviceStorage(self.storage)

    def set_(self, source: Any, *rest: Any) -> torch.Tensor:  # type: ignore[override]
        assert not rest, "only a whole storage is emulated"
        assert self.dtype == torch.uint8, "as bytes"
        return DeviceTensor(_view_of(source.storage, torch.uint8, (source.storage.size,), (1,), 0), source.storage)

    def record_stream(self, stream: Any) -> None:
        raise AssertionError("record_stream is not emulated")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the "
            "tensor to host memory first."
        )

    __array__ = numpy

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class Emulation(TorchDispatchMode):
    """For one thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def _view_of(storage: Storage, dtype: torch.dtype, size: Any, stride: Any, offset: int) -> torch.Tensor:
    if storage.block is None:
        nothing = torch.empty(0, dtype=dtype)
        return nothing.as_strided(size, stride) if 0 in size else nothing
    flat = storage.block.segment.memory.view(dtype)
    return flat.as_strided(size, stride, (storage.block.offset + offset) // dtype.itemsize)


def empty(size: Any, stride: Any, dtype: torch.dtype) -> DeviceTensor:
    """Its bytes are whatever was there."""
    items = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    storage = Storage(card(), 0 if 0 in size else items * dtype.itemsize)
    return DeviceTensor(_view_of(storage, dtype, size, stride, 0), storage)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """As torch's, over what operators take and give; torch looks each type up, for half of a step's time."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([tree_map(function, one) for one in value])
    if kind is dict:
        return {name: tree_map(function, one) for name, one in value.items()}
    return function(value)


def tree_leaves(value: Any) -> list[Any]:
    kind = type(value)
    if kind is dict:
        value = value.values()
    elif kind is not tuple and kind is not list:
        return [value]
    return [leaf for one in value for leaf in tree_leaves(one)]


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and isinstance(value, DeviceTensor)


def _on_card(device: Any) -> bool:
    """Raises RuntimeError for another card than that of this process."""
    if device is None:
        return False
    wanted = torch.device(device)
    if wanted.type == "cuda":
        index = card().current_index if wanted.index is None else wanted.index
        if index != card().device.index:
            raise RuntimeError(f"a tensor on cuda:{index}, in the process of {card().device}")
    return wanted.type in ("cuda", "meta")


def _to_meta(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, torch.Tensor) and value.dim():
        return value.to("meta")
    return value


def _to_host(value: Any) -> Any:
    if isinstance(value, DeviceTensor):
        return value.mem
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


@functools.cache
def _is_composite(func: Any) -> bool:
    """Made of other operators, which come here instead: in inference mode torch leaves that to us."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    if _is_composite(func):
        leaves = tree_leaves((args, kwargs))
        # ``x.to(device, dtype)`` gives its device by position.
        if any(
            isinstance(one, DeviceTensor) or (isinstance(one, torch.device) and _on_card(one)) for one in leaves
        ) or _on_card(kwargs.get("device")):
            with Emulation():
                return func.decompose(*args, **kwargs)
    with torch._C._DisableTorchDispatch():
        return _dispatch(func, args, kwargs)


def _dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    leaves = tree_leaves((args, kwargs))
    on_card = [one for one in leaves if isinstance(one, DeviceTensor)]
    on_host = [one for one in leaves if isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor)]
    wanted = kwargs.get("device")
    if not on_card and not _on_card(wanted):
        return _on_the_host(func, args, kwargs, on_host)
    if func is COPY:
        _copy(args[0], args[1], bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
        return args[0]
    if func is TO:
        return _converted(args[0], kwargs)
    if func in BY_INDEX:
        args = _checked_indices(func, args)
    elif [one for one in on_host if one.dim()]:
        raise _mixed(func)
    if func in TO_PYTHON:
        card().wait(func.__name__)
        return func(*tree_map(_to_host, args), **kwargs)
    if not on_card:
        return _made(func, args, kwargs)
    if (func.is_view and func is not A.lift_fresh.default) or func in ALIASES:
        return _viewed(func, args, kwargs, on_card[0])
    if func in PRODUCTS:
        card().product()
    return _computed(func, args, kwargs, on_card)


def _mixed(func: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (in {func})"
    )


def _on_the_host(func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    pinned = bool(kwargs.get("pin_memory"))
    if pinned:
        kwargs = kwargs | {"pin_memory": False}
    written = _written(func, args, kwargs)
    for one in tensors if card()._copies and not func.is_view else ():
        card().host_touches(span_of(one), writes=any(one is other for other in written))
    made = func(*args, **kwargs)
    if pinned:
        made = card().pin_by_torch(made)
    return made


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    values = []
    for at, name in _mutable(func):
        value = args[at] if at < len(args) else kwargs.get(name)
        values += value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, torch.Tensor)]


@functools.cache
def _mutable(func: Any) -> list[tuple[int, str]]:
    """Places and names of the parameters that it writes."""
    return [
        (at, parameter.name)
        for at, parameter in enumerate(func._schema.arguments)
        if parameter.alias_info is not None and parameter.alias_info.is_write
    ]


_shapes: dict[tuple[Any, ...], Any] = {}


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Results without values: their sizes, strides and dtypes. Computed once for arguments of one kind."""
    try:
        key = (func, _kind(args), _kind(kwargs))
        known = _shapes.get(key)
    except TypeError:  # something that has no hash, or a value of the host
        key = known = None
    if known is None:
        meta = {name: tree_map(_to_meta, value) for name, value in kwargs.items() if name != "pin_memory"}
        if meta.get("device") is not None:
            meta["device"] = torch.device("meta")
        known = func(*tree_map(_to_meta, args), **meta)
        if key is not None:
            _shapes[key] = known
    return known


def _kind(value: Any) -> Any:
    """All that sizes, strides and dtypes of results depend on. Raises TypeError for a tensor of the host."""
    kind = type(value)
    if kind is tuple or kind is list:
        return tuple([_kind(one) for one in value])
    if kind is dict:
        return tuple([(name, _kind(one)) for name, one in value.items()])
    if isinstance(value, DeviceTensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, torch.Tensor):
        raise TypeError("its value may count")
    return kind, value


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """A factory's."""
    shape = _on_meta(func, args, kwargs)
    made = empty(shape.size(), shape.stride(), shape.dtype)
    if func._schema.name not in ("aten::empty", "aten::empty_strided"):
        host = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        mem = made.mem
        if torch.Tag.nondeterministic_seeded in func.tags:  # a generator goes on when it is asked
            drawn = func(*args, **host)
            card().enqueue(func.__name__, lambda: _nothing(mem.copy_(drawn)), (), [made])
        else:
            card().enqueue(func.__name__, lambda: _nothing(mem.copy_(func(*args, **host))), (), [made])
    return made


def _viewed(func: Any, args: Any, kwargs: Any, base: DeviceTensor) -> Any:
    """A view is an inference tensor where its base is one, whatever the mode of now."""
    host_args = tree_map(_to_host, args)
    if func is A.as_strided.default and len(args) > 3 and base.storage.block is not None:
        # Its offset begins at the tensor's own storage, and the host's bytes are those of a whole segment.
        host_args = (*host_args[:3], args[3] + base.storage.block.offset // base.itemsize)
    views = func(*host_args, **tree_map(_to_host, kwargs))
    with torch.inference_mode(base.is_inference()):
        return tree_map(lambda one: DeviceTensor(one, base.storage) if isinstance(one, torch.Tensor) else one, views)


def _host_kwargs(kwargs: Any) -> dict[str, Any]:
    host = {name: tree_map(_to_host, value) for name, value in kwargs.items() if name != "pin_memory"}
    return host | ({"device": torch.device("cpu")} if host.get("device") is not None else {})


def _computed(func: Any, args: Any, kwargs: Any, on_card: list[DeviceTensor]) -> Any:
    written = _written(func, args, kwargs)
    host_args, host_kwargs = tree_map(_to_host, args), _host_kwargs(kwargs)
    reads = [one for one in on_card if not any(one is other for other in written)]
    name = func.__name__
    if func in SHAPES_BY_VALUE or _masks(func, args):
        card().wait(name)
        results = func(*host_args, **host_kwargs)
        return args[0] if written else tree_map(_brought, results)
    if written:
        if "out" in kwargs and kwargs["out"].numel() == 0:  # arange makes an empty tensor, and fills that
            shape = _on_meta(func, args, kwargs)
            made = empty(shape.size(), shape.stride(), shape.dtype)
            host_kwargs["out"], written = made.mem, [made]
        if func in BY_ROW:
            card().enqueue(name, lambda: _by_row(func, host_args, host_kwargs), *_whole(func, args, kwargs), on_card)
        else:
            card().enqueue(name, lambda: _nothing(func(*host_args, **host_kwargs)), reads, written)
        return written[0] if len(func._schema.returns) == 1 else tuple(written)
    shapes = _on_meta(func, args, kwargs)
    made = tree_map(
        lambda one: empty(one.size(), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one, shapes
    )
    tensors = [one for one in tree_leaves(made) if isinstance(one, DeviceTensor)]
    targets = [one.mem for one in tensors]

    if func is A.index_select.default:
        reads = [one for one in reads if one is not args[0]]

    def run() -> Any:
        results = tree_leaves(func(*host_args, **host_kwargs))
        for target, result in zip(targets, filter(torch.is_tensor, results), strict=True):
            target.copy_(result)
        return (_rows(*host_args[:3]), []) if func is A.index_select.default else None

    card().enqueue(name, run, reads, tensors, on_card)
    return made


def tensor(values: Any, *, device: Any = None, **more: Any) -> torch.Tensor:
    """``torch.tensor``, which otherwise asks for a guard of the device."""
    made = _tensor(values, **more)
    return made.to(device) if _on_card(device) else made


_tensor = torch.tensor


def _dense_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Of a copy."""
    return torch.empty_like(torch.empty_strided(x.size(), x.stride(), device="meta")).stride()


def _nothing(_: Any) -> None:
    return None


def _brought(value: Any) -> Any:
    """A result of the host, on the card."""
    if not isinstance(value, torch.Tensor):
        return value
    made = empty(value.size(), value.stride(), value.dtype)
    mem = made.mem  # behind the poison of whoever had this memory
    card().enqueue("copy_", lambda: _nothing(mem.copy_(value)), (), [made])
    return made


def _masks(func: Any, args: Any) -> bool:
    """Indices by a mask need its count. A single value goes by masked_fill."""
    if func not in BY_INDEX or not any(one is not None and one.dtype == torch.bool for one in args[1]):
        return False
    return not (len(args) > 2 and args[2].numel() == 1)


def _checked_indices(func: Any, args: Any) -> Any:
    """Indices on the host are copied first, as CUDA does; anything else there is an error."""
    if not isinstance(args[0], DeviceTensor):
        raise RuntimeError("indices should be either on cpu or on the same device as the tensor (cpu)")
    indices = []
    for one in args[1]:
        if one is not None and not isinstance(one, DeviceTensor):
            held = empty(one.size(), one.stride(), one.dtype)
            _copy(held, one, False)
            one = held
        indices.append(one)
    if len(args) > 2 and args[2].dim() and not isinstance(args[2], DeviceTensor):
        raise _mixed(func)
    return (args[0], indices, *args[2:])


def _converted(source: torch.Tensor, kwargs: Any) -> Any:
    dtype = kwargs.get("dtype") or source.dtype
    target = kwargs.get("device")
    target = source.device if target is None else torch.device(target)
    if isinstance(source, DeviceTensor) and _on_card(target):
        if dtype == source.dtype and kwargs.get("memory_format") is None:
            return source  # ``to`` asked because it takes this tensor for one on "meta"
        return _computed(TO, (source,), {"dtype": dtype}, [source])
    blocking = not kwargs.get("non_blocking", False)
    size, stride = source.size(), _dense_strides(source)
    if _on_card(target):
        made: torch.Tensor = empty(size, stride, dtype)
        _copy(made, source, not blocking)
        return made
    home = torch.empty_strided(size, stride, dtype=dtype)
    if not blocking:
        home = card().pin_by_torch(home)
    _copy(home, source, not blocking)
    return home


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    if not target.numel():
        return
    if isinstance(target, DeviceTensor) and isinstance(source, DeviceTensor):
        into, of = target.mem, source.mem
        card().enqueue("copy_", lambda: _nothing(into.copy_(of)), [source], [target])
        return
    to_card = isinstance(target, DeviceTensor)
    host = source if to_card else target
    if to_card and not host.dim():  # a scalar travels with the launch
        value, into = host.clone(), target.mem  # type: ignore[attr-defined]
        card().enqueue("fill_", lambda: _nothing(into.copy_(value)), (), [target])
        return
    if not (non_blocking and card().is_pinned(host)):
        card().wait("a copy from pageable memory" if to_card else "a copy to the host")
        if to_card:
            target.mem.copy_(source)  # type: ignore[attr-defined]
        else:
            target.copy_(source.mem)  # type: ignore[attr-defined]
        return
    _copy_later(target, source, host, to_card)


def _copy_later(target: torch.Tensor, source: torch.Tensor, host: torch.Tensor, to_card: bool) -> None:
    """With pinned memory. Until it has ended, its source must not change, and its target is undefined."""
    one = card()
    into, of = _to_host_view(target), _to_host_view(source)
    spans: Any = ([], [target]) if to_card else ([source], [])
    if one.own_capture() is not None or not one.computes:
        one.enqueue("copy_", lambda: _nothing(into.copy_(of)), *spans)
        return
    alone = not one.copies_of(span_of(host))  # another copy may change these bytes, in the stream's order
    if alone and not to_card and host.is_contiguous() and host.nbytes > 1 and host.data_ptr() % 2 == 0:
        poison(host.view(-1).view(torch.uint8))
    before = _bytes_of(host).clone()
    copy = one.copy_of_host(host, into=not to_card)

    def run() -> None:
        if alone and not torch.equal(_bytes_of(host), before):
            one.report("reused", f"the host wrote to the buffer of the copy at {copy.place} before its end")
        one.end_copy(copy)
        if one.values:
            into.copy_(of)
        elif not to_card:
            into.zero_()

    one.enqueue("copy_", run, *spans, always=True)


def _to_host_view(one: torch.Tensor) -> torch.Tensor:
    return one.mem if isinstance(one, DeviceTensor) else one


def _whole(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """What ``func`` of BY_ROW reads and writes from end to end: all but the tensor that has the rows."""
    written = _written(func, args, kwargs)
    others = [one for one in tree_leaves((args[1:], kwargs)) if isinstance(one, DeviceTensor)]
    return (
        [one for one in others if not any(one is other for other in written)],
        [one for one in written if one is not args[0]],
    )


def _by_row(func: Any, args: Any, kwargs: Any) -> tuple[list[Span], list[Span]]:
    """Computes; the spans of the rows."""
    func(*args, **kwargs)
    touched = _rows(*args[:3])
    return ([], touched) if func._schema.is_mutable and func is not A.index_select.out else (touched, [])


def _rows(whole: torch.Tensor, dim: int, index: torch.Tensor) -> list[Span]:
    if dim not in (0, -whole.dim()):
        return [span_of(whole)]
    return [span_of(whole.select(dim, at)) for at in sorted(set(index.reshape(-1).tolist()))]


def _bytes_of(host: torch.Tensor) -> torch.Tensor:
    return host.contiguous().view(-1).view(torch.uint8)
