"""How a layer with LoRA adapters is split, and which adapters cannot be."""

from typing import Any

import peft
import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from shard_core import SetupError
from shard_tp.adapters import parts_of
from shard_tp.dropout import draw_apart

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()


def adapted(layer: nn.Module, **options: Any) -> nn.Module:
    model = nn.Sequential(layer)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["0"], **options), model)
    return model[0]


def test_each_matrix_is_split_where_its_layer_is() -> None:
    layer = adapted(nn.Linear(4, 4), lora_dropout=0.1)
    assert parts_of("q", layer, COLUMNS) == {"q.base_layer": COLUMNS, "q.lora_B.default": COLUMNS}
    split = {"q.base_layer": ROWS, "q.lora_A.default": ROWS, "q.lora_dropout.default": draw_apart}
    assert parts_of("q", layer, ROWS) == split
    assert parts_of("q", nn.Linear(4, 4), ROWS) == {"q": ROWS}


@pytest.mark.parametrize(
    ("layer", "options", "held"),
    [
        (nn.Linear(4, 4), {"use_dora": True}, "Linear with lora_magnitude_vector"),
        (nn.Embedding(4, 4), {}, "Embedding with lora_embedding_A"),
    ],
)
def test_other_adapters_are_refused_by_name(layer: nn.Module, options: dict[str, Any], held: str) -> None:
    with pytest.raises(SetupError, match=f"'q' is of type {held}, which strategy 'tp' cannot split"):
        parts_of("q", adapted(layer, **options), COLUMNS)
