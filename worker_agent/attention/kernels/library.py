"""Packages of GPU kernels that may be missing, built for something else, or too old: found out without failing.

Nothing here is imported before a caller has found a GPU that could run it: such packages load CUDA libraries when they
are imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from typing import Any

import torch


class Library:
    """The functions of one module that an adapter calls, imported when first asked for.

    `calls`: for each function, the names of parameters that older releases lack. `install`: the command that brings it.
    """

    def __init__(self, module: str, install: str, calls: Mapping[str, tuple[str, ...]]) -> None:
        self._module = module
        self._install = install
        self._calls = calls

    @cached_property
    def refusal(self) -> str | None:
        """Why the functions cannot be called in this process, in words; None if they can."""
        loaded = self._loaded
        return loaded if isinstance(loaded, str) else None

    def call(self, function: str, *arguments: Any, **named: Any) -> Any:
        """What `function` of the module returns. Only where nothing is refused."""
        loaded = self._loaded
        assert not isinstance(loaded, str), loaded
        return loaded[function](*arguments, **named)

    @cached_property
    def _loaded(self) -> dict[str, Any] | str:
        """The functions by name, or the reason why there are none."""
        try:
            module = import_module(self._module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self._module}.".startswith(f"{error.name}."):
                return f"is not installed: {self._install}"
            return f"cannot be imported: {error}"
        except (ImportError, OSError, RuntimeError) as error:
            return f"cannot be imported, most often because it was built for another PyTorch: {error}"
        functions = {}
        for name, needed in self._calls.items():
            functions[name] = getattr(module, name, None)
            if functions[name] is None:
                return f"has no function {name} in {self._module}: {self._install}"
            if missing := _lacking(functions[name], needed):
                return f"has a {name} without {', '.join(sorted(missing))}: {self._install}"
        return functions


def gpu_refusal(
    device: torch.device, dtype: torch.dtype, oldest_major: int, newest_major: int | None = None
) -> str | None:
    """Why half-precision kernels for NVIDIA GPUs of these compute capabilities cannot run here; None if they can."""
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs, the tensors are on {device}"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return f"needs an NVIDIA GPU that PyTorch sees; PyTorch {torch.__version__} sees none"
    major, minor = torch.cuda.get_device_capability(device)
    if major < oldest_major or (newest_major is not None and major > newest_major):
        range_ = f"{oldest_major}.0 and later" if newest_major is None else f"{oldest_major}.0 to {newest_major}.x"
        return f"is for compute capability {range_}; {torch.cuda.get_device_name(device)} has {major}.{minor}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {dtype}"
    return None


def _lacking(function: Any, needed: tuple[str, ...]) -> set[str]:
    """Parameters that `function` does not have. One that takes any names checks them itself: custom operators do."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return set(needed) - set(parameters)
