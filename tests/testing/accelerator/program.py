"""What a process does in the tests of the simulated accelerator, which takes its only slot."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import gc
import io
import traceback
from typing import Any

import pytest
import torch
from torch.utils import checkpoint

from dure.testing import accelerator
from dure.testing.accelerator import Event, Stream

GARBAGE = pytest.approx(float("nan"), nan_ok=True)


def run(names: list[str]) -> dict[str, str]:
    """Run the cases below; return the errors."""
    errors: dict[str, str] = {}
    for name in names:
        try:
            accelerator.install()
            torch.get_device_module("sim").synchronize()
            globals()[f"case_{name}"](torch.get_device_module("sim"))
            errors[name] = ""
        except BaseException:
            errors[name] = traceback.format_exc()
    return errors


def read_by_host_code() -> None:
    """Follow the address of a tensor, as C code for the CPU would."""
    accelerator.install()
    faulthandler.disable()
    ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 16)


def install_over_another_device() -> str:
    """Have the slot taken by another."""
    torch.utils.rename_privateuse1_backend("other")
    try:
        accelerator.install()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------- streams


def case_a_missing_wait_reads_garbage(module: Any) -> None:
    side, x = Stream(), torch.ones(3, device="sim")
    with module.stream(side):
        early = x + 1
    side.synchronize()
    assert early.tolist() == [GARBAGE] * 3


def case_waits_order_streams(module: Any) -> None:
    x, streams = torch.ones(3, device="sim"), (Stream(), Stream(), Stream())
    streams[0].wait_stream(module.current_stream())
    with module.stream(streams[0]):
        x = x + 1
        event = module.current_stream().record_event()
    streams[1].wait_event(event)
    with streams[1]:
        x = x * 3
        event = Event()
        event.record()
    event.wait(streams[2])
    with module.stream(streams[2]):
        assert x.tolist() == [6.0] * 3
    assert event.query() and streams[2].query()


def case_an_event_is_where_it_was_recorded(module: Any) -> None:
    """Later work of its stream does not count."""
    side, x = Stream(), torch.zeros(1, device="sim")
    event = module.current_stream().record_event()
    x += 1
    side.wait_event(event)
    with module.stream(side):
        read = x.clone()
    side.synchronize()
    assert read.item() == 0
    assert Event().query()


def case_a_write_that_does_not_wait_for_a_reader_overtakes_it(module: Any) -> None:
    x, side = torch.ones(1, device="sim"), Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        read = x + 0
    x.fill_(5.0)
    module.current_stream().synchronize()
    module.synchronize()
    assert read.item() == 5


def case_seeds_choose_the_order(module: Any) -> None:
    """Of two streams without a wait between them; with one the result is always the same."""
    raced = {_two_streams(module, seed, waits=False) for seed in range(20)}
    assert raced == {2.0, 3.0}
    assert {_two_streams(module, seed, waits=True) for seed in range(20)} == {3.0}
    assert _two_streams(module, 7, False) == _two_streams(module, 7, False)


def _two_streams(module: Any, seed: int, waits: bool) -> float:
    accelerator.install(seed)
    x, side = torch.ones(1, device="sim"), Stream()
    module.synchronize()
    with module.stream(side):
        x.mul_(2)  # 1 or 2
    if waits:
        module.current_stream().wait_stream(side)
    y = x + 1
    module.synchronize()
    return y.item()


# ---------------------------------------------------------------- memory


def case_memory_that_is_freed_too_early_is_overwritten(module: Any) -> None:
    read = _read_freed(module, lambda x, side: None)
    assert read.item() == GARBAGE


def case_record_stream_keeps_memory(module: Any) -> None:
    assert _read_freed(module, lambda x, side: x.record_stream(side)).item() == 2


def case_a_wait_before_it_is_freed_keeps_memory(module: Any) -> None:
    wait = lambda x, side: module.current_stream().wait_stream(side)  # noqa: E731
    assert _read_freed(module, wait).item() == 2


def _read_freed(module: Any, before_free: Any) -> torch.Tensor:
    """Let another stream read a tensor whose memory the next one gets."""
    x, side = torch.ones(1, device="sim"), Stream()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        read = x + 1
    before_free(x, side)
    del x
    gc.collect()
    torch.empty(1, device="sim")
    module.current_stream().synchronize()
    module.synchronize()
    return read


def case_a_storage_is_freed_and_allocated_again(module: Any) -> None:
    x = torch.ones(4, device="sim")
    view, storage = x[1:], x.untyped_storage()
    storage.resize_(0)
    assert (storage.nbytes(), x.shape) == (0, (4,))
    storage.resize_(16)
    assert view.tolist() == [GARBAGE] * 3
    x.fill_(2.0)
    assert view.tolist() == [2.0] * 3


def case_copies_to_the_host_are_late(module: Any) -> None:
    x, host = torch.ones(2, device="sim"), torch.zeros(2)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [GARBAGE] * 2
    module.current_stream().synchronize()
    assert host.tolist() == [1.0] * 2
    assert x.cpu().tolist() == [1.0] * 2


def case_copies_from_the_host_are_late(module: Any) -> None:
    host = torch.ones(2)
    y, x = host.to("sim"), host.to("sim", non_blocking=True)
    host.zero_()
    assert (x.tolist(), y.tolist()) == ([0.0] * 2, [1.0] * 2)


# ---------------------------------------------------------------- operators


def case_operands_are_on_one_device(module: Any) -> None:
    x = torch.ones(2, device="sim")
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, torch.ones(2)])
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 2
    with pytest.raises(TypeError):
        x.numpy()


def case_a_training_step_is_that_of_the_cpu(module: Any) -> None:
    """Layers, losses, an optimizer, recomputation, gradients that are clipped."""
    assert _train("sim") == pytest.approx(_train("cpu"), rel=1e-4)


def _train(device: str) -> list[float]:
    torch.manual_seed(3)
    parts = [torch.nn.Embedding(7, 8), torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)]
    model = torch.nn.Sequential(*parts, torch.nn.LayerNorm(8), torch.nn.Linear(8, 7)).to(device)
    tokens = torch.randint(7, (5, 3)).to(device)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.1), list[float]()
    for _ in range(3):
        optimizer.zero_grad()
        out = checkpoint.checkpoint(model, tokens, use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_results_whose_shape_depends_on_values(module: Any) -> None:
    x = torch.arange(4, device="sim")
    assert x[x > 1].tolist() == [2, 3]
    assert x.nonzero().tolist() == [[1], [2], [3]]
    assert torch.add(x, 1, out=torch.empty(0, device="sim", dtype=torch.int64)).tolist()[3] == 4


def case_random_numbers_do_not_depend_on_when_they_are_drawn(module: Any) -> None:
    torch.manual_seed(5)
    first, second = torch.randn(2, device="sim"), torch.randn(2, device="sim")
    later, earlier = second.tolist(), first.tolist()
    torch.manual_seed(5)
    assert torch.randn(2, device="sim").tolist() == earlier
    state = module.get_rng_state()
    assert torch.randn(2, device="sim").tolist() == later
    module.set_rng_state(state)
    assert torch.randn(2, device="sim").tolist() == later


def case_tensors_are_copied_and_saved(module: Any) -> None:
    file, x = io.BytesIO(), torch.arange(3.0, device="sim")
    torch.save(x, file)
    file.seek(0)
    loaded = torch.load(file)
    assert (str(loaded.device), loaded.tolist()) == ("sim:0", [0.0, 1.0, 2.0])
    assert copy.deepcopy(x).tolist() == [0.0, 1.0, 2.0]
    z = torch.tensor([1 + 2j], device="sim")
    assert z.conj().tolist() == [1 - 2j]
