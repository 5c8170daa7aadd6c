"""Bringing up XLA's devices in this process, once and in one mode."""

from __future__ import annotations

import functools
import logging
import os

import torch

from shard_core import LaunchError, SetupError, StrategyUnavailable
from shard_xla.strategy import device_module
from shard_xla.strategy.kernels import correct_kernels

log = logging.getLogger(__name__)


def check_accelerator(strategy: str, accelerator: str) -> None:
    """Refuse to take CPUs for TPUs.

    Args:
        strategy: The strategy's name, for messages.
        accelerator: What the user asked for.

    Raises:
        LaunchError: If it is TPUs, and XLA's devices here are CPUs.
    """
    if accelerator == "tpu" and _kind() == "CPU":
        raise LaunchError(
            f"accelerator is 'tpu', but the devices that strategy {strategy!r} finds here are XLA's CPU devices; pass "
            "accelerator='xla' to develop on them."
        )


def _kind() -> str:
    return os.environ.get("PJRT_DEVICE", "CPU")


def start(strategy: str, *, devices: int | None, spmd: bool) -> None:
    """Choose the device of this process and how tensors live on it, before anything of XLA is used.

    Args:
        strategy: The strategy's name, for messages.
        devices: How many devices the CPU is to be; None for what the environment says, else one.
        spmd: Whether tensors are spread over them by the compiler.

    Raises:
        StrategyUnavailable: If the environment asks for other devices than CPUs.
        SetupError: If XLA is in use in this process, in the other mode or with another number of devices.
    """
    kind = _kind()
    if kind != "CPU":
        raise StrategyUnavailable(
            f"PJRT_DEVICE is {kind!r}, and strategy {strategy!r} has only ever been run on CPUs: other devices are not "
            "there yet; unset it, or set PJRT_DEVICE=CPU."
        )
    wanted = devices or int(os.environ.get("CPU_NUM_DEVICES", "1"))
    # Set before the import, which looks at them and would warn.
    os.environ["PJRT_DEVICE"] = kind
    # At every compilation XLA would warn that its partitioner is to be replaced, which no user can do anything about.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from shard_xla._versions import register_device_module, runtime_is_started

    if not runtime_is_started():
        os.environ["CPU_NUM_DEVICES"] = str(wanted)
    import torch_xla
    import torch_xla.runtime as xr

    fresh = not runtime_is_started()
    if spmd and not (fresh or xr.is_spmd()):
        raise SetupError(
            f"strategy {strategy!r} needs a process that has not used XLA before, and this one has; start it first, "
            "in a process of its own."
        )
    if not spmd and xr.is_spmd():
        raise SetupError(
            f"this process is in XLA's SPMD mode, which cannot be left; run strategy {strategy!r} in a process of its "
            "own."
        )
    if spmd and not xr.is_spmd():
        xr.use_spmd()
    there = xr.global_runtime_device_count()
    if there != wanted:
        raise SetupError(
            f"strategy {strategy!r} wants {wanted} XLA devices, but this process uses {there} already; run it in a "
            f"process of its own, or set CPU_NUM_DEVICES={wanted} before anything uses XLA."
        )
    _check_autograd(strategy, torch_xla.device())
    register_device_module(device_module)
    correct_kernels()


def _check_autograd(strategy: str, device: torch.device) -> None:
    """Refuse a process whose autograd does not know the device: it counts devices once, at the first backward."""
    try:
        torch.ones((), device=device, requires_grad=True).mul(2.0).backward()
    except RuntimeError as error:
        if "device_ready_queues" not in str(error):
            raise
        raise SetupError(
            f"strategy {strategy!r} cannot train in this process: a backward ran before there was an XLA device, and "
            "since then autograd takes no further ones; run the strategy in a process of its own, or, without SPMD, "
            "call torch_xla.device() at the top of the script."
        ) from error


@functools.cache
def announce(text: str) -> None:
    """Log something once in a process."""
    log.warning(text)


def seed(seed: int) -> None:
    """Seed the generator of XLA's devices.

    Args:
        seed: Any; XLA takes 63 bits of it.
    """
    import torch_xla

    torch_xla.manual_seed(seed % 2**63)


def random_state() -> torch.Tensor:
    """Return the state of XLA's generator.

    Returns:
        One number, int64; XLA's has no sign.
    """
    import torch_xla.core.xla_model as xm

    state = xm.get_rng_state()
    return torch.tensor([state - 2**64 if state >= 2**63 else state])


def set_random_state(state: torch.Tensor) -> None:
    """Restore the state of XLA's generator.

    Args:
        state: What ``random_state`` returned.
    """
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(int(state) % 2**64)
