"""A pretend GPU, for machines without one: a torch device that keeps CUDA's rules, on the CPU.

A tensor of the device `pretend` is a `DeviceTensor`, whose numbers are in `host`. What CUDA refuses
is refused: operators on tensors of both devices, except CPU numbers without dimensions in pointwise
operators, and CPU indices; NumPy. Optimizers take their foreach path, and a file holds the tensors
as those of `cuda:0`, so that they cannot be loaded here without `map_location`.

Not pretended are memory, speed, streams, random numbers, autocast, and the rounding of a GPU's
kernels.
`install` is for a process of its own. It uses private functions of torch 2.13.
"""

import functools

import torch
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import PreTrainedModel

NAME = "pretend"
aten = torch.ops.aten
COPIES = {aten._to_copy, aten.copy_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
KEPT = []  # the mode, which ends with its object


class DeviceTensor(torch.Tensor):
    """A tensor of the device. `host` is a CPU tensor with its numbers."""

    @staticmethod
    def __new__(cls, host):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=f"{NAME}:0",
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return compute(operator, args, kwargs or {})

    def tolist(self):
        return self.cpu().tolist()

    def __reduce_ex__(self, protocol):
        self.host.untyped_storage().is_pretended = True  # for `location_of`
        return self.host.detach().__reduce_ex__(protocol)


class Everywhere(TorchDispatchMode):
    """Sees the operators without a tensor of the device, such as torch.zeros(2, device=...)."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # what it wraps around each operator takes long

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not types and not kwargs:
            return operator(*args)
        return compute(operator, args, kwargs or {})


def is_pretended(x):
    return isinstance(x, DeviceTensor)


@functools.cache
def rules_of(operator):
    """Return whether an operator copies between devices, indexes, takes CPU numbers, and the names
    and places of the arguments that it writes."""
    packet = operator.overloadpacket
    indexes = packet in INDEXING
    takes_numbers = indexes or torch.Tag.pointwise in operator.tags
    written = [(x.name, k) for k, x in enumerate(operator._schema.arguments) if x.is_write]
    return packet in COPIES, indexes, takes_numbers, written


def compute(operator, args, kwargs):
    """Check the devices of an operator's arguments, compute it on the CPU, and put the results on
    the device that CUDA would put them on."""
    pretended = [leaf for leaf in tree_leaves((args, kwargs)) if is_pretended(leaf)]
    if pretended:
        check_devices(operator, args, kwargs)

    to_device = bool(pretended)
    if kwargs.get("device") is not None:
        to_device = torch.device(kwargs["device"]).type == NAME
    elif operator.overloadpacket is aten.copy_:
        to_device = is_pretended(args[0])

    host_args, host_kwargs = tree_map_only(DeviceTensor, lambda x: x.host, (args, kwargs))
    if to_device and "device" in kwargs:
        host_kwargs["device"] = torch.device("cpu")
    results = operator(*host_args, **host_kwargs)
    if not to_device:
        return results

    # An operator in place returns its argument.
    arguments = {id(tensor.host): tensor for tensor in pretended}

    def place(result):
        return arguments[id(result)] if id(result) in arguments else DeviceTensor(result)

    return tree_map_only(torch.Tensor, place, results)


def check_devices(operator, args, kwargs):
    """Raise RuntimeError if CUDA would, because one of the arguments is on the CPU."""
    copies, indexes, takes_numbers, written = rules_of(operator)
    if copies:
        return
    leaves = tree_leaves((args, kwargs))
    if indexes:
        leaves = [args[0], *args[2:3]]
        if not is_pretended(args[0]):
            raise RuntimeError("indices should be on the device of the indexed tensor, cpu")

    on_cpu = [x for x in leaves if isinstance(x, torch.Tensor) and not is_pretended(x)]
    if on_cpu:
        outputs = [args[k] if k < len(args) else kwargs.get(name) for name, k in written]
        is_output = any(x is y for x in on_cpu for y in outputs)
        numbers = all(x.dim() == 0 for x in on_cpu)
        if is_output or not (takes_numbers and numbers):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! ({operator})"
            )


def location_of(storage):
    """Return where torch.save says that a storage was."""
    return "cuda:0" if hasattr(storage, "is_pretended") else None


class Module(_DummyBackendModule):
    """torch.pretend"""

    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


def install():
    """Add the device to torch, for the rest of the process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    # The engine's threads cannot call a device guard in Python.
    torch.autograd.set_multithreading_enabled(False)
    # `torch.tensor` then moves its numbers with an operator.
    torch._C._set_only_lift_cpu_tensors(True)
    # A tied parameter stays one when a module is moved.
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.serialization.register_package(1, location_of, lambda storage, location: None)
    _foreach_supported_types.append(DeviceTensor)
    # safetensors reads memory, of which the device has none.
    save = PreTrainedModel.save_pretrained
    PreTrainedModel.save_pretrained = lambda model, folder, **_: save(
        model, folder, state_dict={name: x.cpu() for name, x in model.named_parameters()}
    )
    mode = Everywhere()
    mode.__enter__()
    KEPT.append(mode)
