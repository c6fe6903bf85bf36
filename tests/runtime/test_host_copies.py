"""What a forward copies from the host is on the device when it is captured, whichever way it is spelled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_captured_forward import inputs, made, plain, refused, replays
from test_text_lengths import device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_rewrite_runtime.forward.host_copies import ChangesFromCallToCall, HostCopies
from hf_rewrite_runtime.forward.known_numbers import READS, KnownNumbers
from hf_rewrite_runtime.guards.snapshot import Snapshot, unfit_weights

__all__ = ["device"]

META = torch.device("meta")


def added(x: Tensor) -> Tensor:
    scale = torch.tensor(3.0, device=x.device)
    scale += 1
    return x * scale


def set_by_numbers(x: Tensor) -> Tensor:
    sizes = torch.empty(2, 2, dtype=torch.long, device=x.device)
    sizes[0, 0], sizes[0, 1] = 5, True
    sizes[1] = torch.tensor([1, 2])
    return x + sizes.sum()


def assigned(x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.tensor([0, 2])] = torch.tensor(2.0)
    x[[1]] = 4.0
    return x


def filled(x: Tensor) -> Tensor:
    x = x.clone()
    x[x > 0] = torch.tensor(2.0)
    x[x < -1] = 3
    return x + torch.tensor(1.0, device=x.device)


COPIES = {
    "a number": added,
    "a list": lambda x: x + torch.tensor([1.0, 2.0, 3.0], device=x.device),
    "a list of lists": lambda x: x @ torch.as_tensor([[1, 2, 3]] * 3, device=x.device, dtype=x.dtype),
    "a new tensor": lambda x: x * x.new_tensor([1.0, 2.0, 4.0]),
    "another's type": lambda x: x - torch.tensor(5.0).type_as(x),
    "to another": lambda x: x - torch.tensor([5.0]).to(x),
    "to a device, and a dtype": lambda x: x - torch.arange(3).to(x.device, torch.float32),
    "by name": lambda x: x - torch.arange(3).to(dtype=x.dtype, device=x.device),
    "numpy": lambda x: x * torch.from_numpy(np.linspace(0.5, 1.5, 3, dtype=np.float32)).to(x.device),
    "numbers of a table": set_by_numbers,
    "an index": lambda x: x[torch.tensor([2, 0, 1])],
    "a list as an index": lambda x: x[:, [2, 0, 1]],
    "a host's mask": lambda x: x[torch.tensor([True, False, True])].sum(0),
    "assigned": assigned,
    "chosen": lambda x: torch.where(x > 0, torch.tensor(-1.0), x),
}


def checked(x: Tensor) -> Tensor:
    sizes = torch.tensor([1, 3], device=x.device)
    if sizes.sum() != 4:
        raise ValueError
    return x + sizes.sum()


class Transfers(TorchDispatchMode):
    """Lists operators that are given tensors of the host and of the device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, Tensor) and one.numel()]
        if {one.device.type for one in tensors} == {"cpu", "meta"}:
            self.found.append(str(func))
        return out


@pytest.mark.parametrize("spelling", COPIES)
def test_nothing_is_copied_a_second_time(spelling):
    copies, x = HostCopies(META), torch.empty(3, 3, device=META)
    with copies:
        wanted = COPIES[spelling](x)
    assert copies
    with Transfers() as seen, copies:
        found = COPIES[spelling](x)
    assert seen.found == []
    assert (found.shape, found.dtype, found.device) == (wanted.shape, wanted.dtype, wanted.device)


def test_what_is_on_the_device_is_left_alone():
    copies, x = HostCopies(META), torch.empty(3, 3, device=META)
    with copies:
        torch.full((), 2.0, device=META)
        torch.tensor([], device=META)
        torch.tensor([1.0]) + torch.tensor(2.0)
        x.to(torch.float16)[0:1, None].masked_fill(x > 0, 1.0)
        torch.tensor(x.shape)
    assert not copies


def test_another_value_at_each_run_is_no_constant():
    copies, x = HostCopies(META), torch.empty(3, device=META)
    for number in (1.0, 1.0):
        with copies:
            x.new_tensor(number)
    with pytest.raises(ChangesFromCallToCall, match="number 0"), copies:
        x.new_tensor(2.0)
    with pytest.raises(ChangesFromCallToCall), copies:
        x.new_tensor([1.0])


def test_nan_is_a_value():
    copies, x = HostCopies(META), torch.empty(3, device=META)
    for _ in range(2):
        with copies:
            x.new_tensor(float("nan"))
    with pytest.raises(ChangesFromCallToCall), copies:
        x.new_tensor(0.0)


def from_attribute(model, x, keywords):
    return model.linear(x)[:, :3] + model.table.type_as(x).to(x.device)


class Followed(TorchFunctionMode):
    """What `HostCopies` does about numbers, on a CPU: `copied` stands for a copy from the host."""

    def __init__(self):
        super().__init__()
        self.numbers = KnownNumbers(torch.device("cpu"))
        self.known = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        is_known, number = self.numbers.read(func, args, kwargs or {})
        if func in READS:
            self.known.append(is_known)
        if is_known:
            return number
        result = func(*args, **(kwargs or {}))
        self.numbers.follow(func, args, kwargs or {}, result)
        return result

    def copied(self, values):
        tensor = torch.tensor(values)
        self.numbers.add(tensor)
        return tensor


def sizes_of(mode, x):
    sizes = torch.empty(2, 2, dtype=torch.long)
    sizes[0], sizes[1, 0], sizes[1, 1] = mode.copied([2, 3]), 4, 5
    return sizes


READ = {
    "a copy": (lambda mode, x: mode.copied([3, 4])[1], True),
    "a table": (lambda mode, x: (sizes_of(mode, x).prod(1).sum() == 26).all(), True),
    "a view that is written": (lambda mode, x: sizes_of(mode, x)[0].add_(mode.copied([1, 1])).sum(), True),
    "a part of the input": (lambda mode, x: sizes_of(mode, x).sum() + x[0], False),
    "the input in a table": (lambda mode, x: sizes_of(mode, x).index_fill_(0, mode.copied([0]), x[0]).sum(), False),
    "the input put into it": (lambda mode, x: put(sizes_of(mode, x), x).sum(), False),
    "through a view": (lambda mode, x: through_a_view(sizes_of(mode, x), x).sum(), False),
    "chosen by the input": (lambda mode, x: torch.where(x > 0, mode.copied([1, 2, 3]), 0).sum(), False),
    "drawn": (lambda mode, x: torch.randint_like(mode.copied([3, 4]), 9).sum(), False),
    "nobody's": (lambda mode, x: torch.zeros(3, dtype=torch.long).sum(), False),
    "not a whole number": (lambda mode, x: mode.copied([3, 4]).float().sum(), False),
}


def put(table, x):
    table[1] = x[:2]
    return table


def through_a_view(table, x):
    table.view(-1)[2:3].copy_(x[:1])
    return table


@pytest.mark.parametrize("kind", READ)
def test_numbers_that_follow_from_the_host_s_are_known(kind):
    made, wanted = READ[kind]
    with Followed() as mode:
        made(mode, torch.arange(3)).item()
    assert mode.known == [wanted]


def test_a_known_number_is_read_once():
    mode = Followed()
    found = []
    for value in (7, 8):
        mode.numbers.begin()
        with mode:
            found.append(mode.copied([value])[0].item())
    assert found == [7, 7]  # that it is another one, the copies say


@pytest.mark.gpu
@pytest.mark.parametrize("spelling", [*COPIES, "a check", "a mask", "an attribute"])
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_graph_has_what_the_host_copies(device, spelling):
    copied = (COPIES | {"a check": checked, "a mask": filled}).get(spelling)
    model = made(device, from_attribute if copied is None else lambda model, x, _: copied(model.linear(x)[:3, :3]))
    model.table = torch.arange(3)
    for number in range(3):
        torch.testing.assert_close(model(inputs(device, number)), plain(model, inputs(device, number)))
    assert not refused(model)
    assert replays(model) == 2
    model.table += 1  # of which the graph has another copy
    torch.testing.assert_close(model(inputs(device)), plain(model, inputs(device)))


def test_a_table_on_the_host_is_followed():
    model = nn.Linear(3, 3, device=META)
    model.table = torch.arange(3)
    snapshot = Snapshot(model)
    assert snapshot.is_current()
    assert not unfit_weights(snapshot.tensors, META)
    model.table += 1
    assert not snapshot.is_current()
    model.weight = nn.Parameter(torch.ones(3, 3))
    assert unfit_weights(Snapshot(model).tensors, META)
