"""The names and sizes of element types in safetensors files, known without torch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    import torch

#: Bytes per element.
ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@functools.cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch

    return {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16, "BF16": torch.bfloat16,
        "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
        "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
    }  # fmt: skip


@functools.cache
def _codes() -> dict[torch.dtype, str]:
    return {dtype: code for code, dtype in _torch_dtypes().items()}


def torch_dtype(code: str) -> torch.dtype:
    """Translate the name in a file to torch's dtype.

    Example:
        >>> torch_dtype("BF16")
        torch.bfloat16
    """
    return _torch_dtypes()[code]


def dtype_code(dtype: torch.dtype, owner: str) -> str:
    """Translate torch's dtype to the name in a file.

    Args:
        dtype: A tensor's dtype.
        owner: The tensor's name, for the message.

    Raises:
        CheckpointError: If safetensors files have no such type.

    Example:
        >>> import torch
        >>> dtype_code(torch.bfloat16, "weight")
        'BF16'
    """
    code = _codes().get(dtype)
    if code is None:
        raise CheckpointError(
            f"{owner!r} has dtype {str(dtype).removeprefix('torch.')}, which safetensors files cannot hold; "
            "store it in another dtype (a complex128 as two float64 tensors, say)."
        )
    return code
