"""Checks whether a device can be used, finds its streams, and copies nested values to it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

Device = torch.device | str | int


def usable_device(device: Device) -> torch.device:
    """Returns a device, with its number if it has one; raises a RuntimeError if nothing can be put there."""
    place = torch.device(device)
    try:
        return torch.empty(0, device=place).device
    except (RuntimeError, AssertionError, ImportError) as error:  # without CUDA torch raises AssertionError
        reason = str(error).partition("\n")[0]
        raise RuntimeError(
            f"device {str(place)!r} cannot be used in this process: {reason}. Pass another one."
        ) from error


def streams_of(device: torch.device) -> Any:
    """Returns torch's module for a kind of device with streams, such as torch.cuda; None if it has no streams."""
    module = getattr(torch, device.type, None)
    return module if device.type != "cpu" and hasattr(module, "Stream") else None


def copied(value: Any, device: torch.device, parts: list[Any]) -> Any:
    """Returns a value in which all that has a method ``to`` is copied; adds the copied tensors to `parts`."""
    if callable(getattr(type(value), "to", None)):
        try:
            moved = value.to(device, non_blocking=True)
        except TypeError:  # batches of some tokenizers take only the device
            moved = value.to(device)
        if moved is not value and hasattr(moved, "record_stream"):
            parts.append(moved)
        return moved
    if isinstance(value, Mapping):
        return _rebuilt_mapping(value, {key: copied(field, device, parts) for key, field in value.items()})
    if isinstance(value, (list, tuple)):
        return _rebuilt_sequence(value, [copied(element, device, parts) for element in value])
    return value


# As torch's `pin_memory` does: a copy of a collection keeps what its type adds, such as the factory of a defaultdict.
def _rebuilt_mapping(value: Mapping[Any, Any], fields: dict[Any, Any]) -> Any:
    """Returns a mapping of the same type with other fields; a dict if its type cannot be made from one."""
    try:
        if isinstance(value, MutableMapping):
            clone = copy.copy(value)
            clone.update(fields)
            return clone
        return type(value)(fields)  # type: ignore[call-arg]
    except TypeError:
        return fields


def _rebuilt_sequence(value: list[Any] | tuple[Any, ...], elements: list[Any]) -> Any:
    """Returns a list or tuple of the same type with other elements."""
    if isinstance(value, list):
        clone = copy.copy(value)
        clone[:] = elements
        return clone
    return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
