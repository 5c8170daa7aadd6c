"""Which changes of a module after setup are noticed, and what looking for them looks at."""

import pytest
import torch
from torch import nn

from shard_core.errors import SetupError
from shard_core.preparation.replacement_check import ReplacementCheck


def test_only_parts_that_hold_parameters_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ParameterList([nn.Parameter(torch.ones(2))]))
    placed = ReplacementCheck(model)
    seen: list[nn.Module] = []
    listed = nn.Module.named_parameters
    monkeypatch.setattr(
        nn.Module, "named_parameters", lambda part, **options: (seen.append(part), listed(part, **options))[1]
    )
    placed.check()
    assert seen == [model[0][0], model[1]]
    model[1][0] = nn.Parameter(torch.zeros(2))
    with pytest.raises(SetupError, match=r"'1\.0' is not the parameter that setup has left there"):
        placed.check()
    placed.check(lambda: {model[1][0]: placed._places[1][2][0][1]})
    model[0].to(torch.bfloat16)
    with pytest.raises(SetupError, match=r"'0\.0\.weight' is torch\.bfloat16 and was torch\.float32 at setup"):
        placed.check()


def test_exchanged_parameters_are_found_wherever_they_stand() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    placed = ReplacementCheck(model)
    inner, model[0] = model[0], nn.Sequential(model[0], nn.Dropout())  # all are there, under other names
    placed.check_held(alone=True)
    model[1] = nn.Linear(2, 2).requires_grad_(False)
    placed.check_held()
    with pytest.raises(SetupError, match=r"'1\.weight' was put into the module after setup"):
        placed.check_held(alone=True)
    placed.check_held(alone=True, new_parts=False)
    model[0] = inner
    inner[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(SetupError, match=r"'0\.0\.weight' is another parameter than setup has left there"):
        placed.check_held()
    inner[0].weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(SetupError, match=r"'0\.0\.weight' has the shape \(3, 2\) and had \(2, 2\) at setup"):
        placed.check_held()


def test_resized_parameters_are_found_unless_their_values_are_away() -> None:
    model = nn.Linear(2, 2)
    whole, spread = ReplacementCheck(model), ReplacementCheck(model, lambda parameter: (4, *parameter.shape[1:]))
    model.weight.data = torch.ones(4, 2)
    model.bias.data = torch.empty(0)
    with pytest.raises(SetupError, match=r"'weight' has the shape \(4, 2\) and had \(2, 2\) at setup"):
        whole.check_shapes()
    spread.check_shapes()
    model.weight.data = torch.ones(3, 2)
    with pytest.raises(SetupError, match=r"'weight' has the shape \(3, 2\) and had \(4, 2\) at setup"):
        spread.check_shapes()
