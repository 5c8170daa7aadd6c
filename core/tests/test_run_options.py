from __future__ import annotations

import dataclasses
from datetime import timedelta

import pytest
import torch

from shard_core.collectives.single import SingleCollectives
from shard_core.errors import InvalidOption, UnsupportedPrecision
from shard_core.run_options import RunOptions


@pytest.mark.parametrize(
    ("given", "means"),
    [("auto", "auto"), ("cpu", "cpu"), ("cuda", "cuda"), ("gpu", "cuda"), ("xla", "xla"), ("tpu", "tpu")],
)
def test_accelerators(given, means):
    assert RunOptions(accelerator=given).accelerator == means


@pytest.mark.parametrize(
    ("given", "means"), [("auto", "auto"), (1, 1), (8, 8), ("2", 2), ([0], (0,)), ((3, 1), (3, 1))]
)
def test_devices(given, means):
    assert RunOptions(devices=given).devices == means


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accelerator": "gpu"},
        {"devices": 2},
        {"devices": [0, 1]},
    ],
    ids=str,
)
def test_devices_themselves(options):
    given = RunOptions(parallel_devices=["cuda:0", torch.device("cuda", 1)], **options)
    assert given.parallel_devices == (torch.device("cuda", 0), torch.device("cuda", 1))
    assert given.device_type == "cuda"


@pytest.mark.parametrize(("accelerator", "means"), [("auto", None), ("gpu", "cuda"), ("xla", "xla"), ("tpu", "xla")])
def test_accelerators_have_a_device_type(accelerator, means):
    assert RunOptions(accelerator=accelerator).device_type == means


@pytest.mark.parametrize("devices", [0, -1, True, False, "", "two", "0", "-1", "1.0", "²", 2.0, None, [], [-1], ["0"]])
def test_devices_that_are_none(devices):
    with pytest.raises(InvalidOption) as caught:
        RunOptions(devices=devices)
    assert str(caught.value) == (
        f"devices is {devices!r}; allowed are 'auto', a number from 1 up, or a list of device numbers such as [0, 1]."
    )


BAD = {
    "accelerator unknown": (
        {"accelerator": "cude"},
        "accelerator is 'cude'; did you mean 'cuda'? allowed are: auto, ",
    ),
    "accelerator far off": (
        {"accelerator": "abacus"},
        "accelerator is 'abacus'; allowed are: auto, cpu, cuda, gpu",
    ),
    "accelerator type": ({"accelerator": 1}, "accelerator is 1; allowed are: auto"),
    "device twice": (
        {"devices": [0, 0]},
        "devices is [0, 0], which names one twice; every rank needs its own.",
    ),
    "no nodes": ({"num_nodes": 0}, "num_nodes is 0; it must be a whole number from 1 up."),
    "nodes type": ({"num_nodes": "2"}, "num_nodes is '2'; it must be a whole number from 1 up."),
    "parallel_devices type": (
        {"parallel_devices": "cpu"},
        "parallel_devices is 'cpu', of type str; it must be list",
    ),
    "parallel_devices empty": (
        {"parallel_devices": []},
        "parallel_devices is empty; give one device per rank",
    ),
    "parallel_devices number": (
        {"parallel_devices": [0]},
        "parallel_devices has 0, of type int; give devices such as torch.device('cuda', 0), or devices=[0].",
    ),
    "parallel_devices word": (
        {"parallel_devices": ["cdua:0"]},
        "parallel_devices has 'cdua:0', which torch knows no device by; give devices such as torch.device('cuda', 0),",
    ),
    "parallel_devices mixed": (
        {"parallel_devices": ["cpu", "cuda:0"]},
        "parallel_devices names devices of several types, cpu and cuda; all ranks of a strategy have one type.",
    ),
    "parallel_devices and accelerator": (
        {"parallel_devices": ["cpu"], "accelerator": "gpu"},
        "parallel_devices names cpu devices, but accelerator is 'cuda'; leave accelerator out.",
    ),
    "parallel_devices and number": (
        {"parallel_devices": ["cpu", "cpu"], "devices": 3},
        "parallel_devices names 2 devices, but devices is 3; leave devices out.",
    ),
    "parallel_devices and numbers": (
        {"parallel_devices": ["cuda:0", "cuda:1"], "devices": [1, 0]},
        "parallel_devices names cuda:0, cuda:1, but devices is [1, 0]; leave devices out.",
    ),
    "cluster_environment": ({"cluster_environment": "SLURM"}, "cluster_environment is 'SLURM', of type str"),
    "precision": (
        {"precision": None},
        "precision is None, of type NoneType; it must be str or PrecisionPolicy or",
    ),
    "collectives": (
        {"collectives": 1},
        "collectives is 1, of type int; it must be str or Collectives or None.",
    ),
    "launcher": (
        {"launcher": "torchrun"},
        "launcher is 'torchrun', of type str; it must be Launcher or None.",
    ),
    "process_group_backend": (
        {"process_group_backend": 1},
        "process_group_backend is 1, of type int; it must be str",
    ),
    "timeout type": ({"timeout": 60}, "timeout is 60, of type int; it must be timedelta."),
    "guard_timeout type": (
        {"guard_timeout": 6.0},
        "guard_timeout is 6.0, of type float; it must be timedelta.",
    ),
    "timeout of nothing": (
        {"timeout": timedelta(0)},
        "timeout is datetime.timedelta(0); it must be longer than nothing",
    ),
    "negative guard": ({"guard_timeout": timedelta(seconds=-1)}, "it must be longer than nothing."),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_gets_a_sentence(arguments, sentence):
    with pytest.raises(InvalidOption) as caught:
        RunOptions(**arguments)
    assert sentence in str(caught.value)


def test_precision_names_are_resolved():
    assert [RunOptions(precision=each).precision for each in (32, "16", "bf16", 64)] == [
        "32-true",
        "16-mixed",
        "bf16-mixed",
        "64-true",
    ]
    with pytest.raises(UnsupportedPrecision, match="there is no precision 8"):
        RunOptions(precision=8)


def test_parts_pass_through():
    part = SingleCollectives()
    assert RunOptions(collectives=part).collectives is part


def test_it_is_a_value():
    run = RunOptions()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.devices = 2
    assert run == RunOptions(accelerator="auto", devices="auto")
