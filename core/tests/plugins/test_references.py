from __future__ import annotations

import pytest

from shard_core.errors import BrokenBackend
from shard_core.plugins import load_object

UNINSTALL = "pgrade or uninstall shard-toy."


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        ("toy_strategy:ToyStategy", "but that module has no such name; did you mean 'ToyStrategy'? U"),
        ("toy_strategy:Bicycle", "but that module has no such name. U"),
        ("toy_strategy.ToyStrategy", "which is not of the form 'package.module:name'; u"),
        ("toy_strategy:", "which is not of the form 'package.module:name'; u"),
    ],
)
def test_a_factory_with_a_slip_gets_a_sentence(site, reference, sentence):
    site.install("shard-toy", modules={"toy_strategy": "class ToyStrategy:\n    pass\n"})
    with pytest.raises(BrokenBackend) as caught:
        load_object(reference, "shard-toy")
    assert str(caught.value) == f"shard-toy refers to {reference!r}, {sentence}{UNINSTALL}"


def test_a_factory_whose_module_is_not_there_names_it(site):
    site.install("shard-toy", modules={"toy_strategy": ""})
    with pytest.raises(BrokenBackend, match="its module 'toy_stategy' cannot be imported"):
        load_object("toy_stategy:ToyStrategy", "shard-toy")
