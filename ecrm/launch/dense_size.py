"""The number of dense parameters of a config's model, known without torch."""

from __future__ import annotations

from collections.abc import Sequence

from ecrm.config.schema import ModelConfig
from ecrm.data.described import Described


def dense_parameters(model: ModelConfig, data: Described) -> int:
    """The number of floats of the dense parameters, as in `ecrm.recipes.models`."""
    if model.architecture == "two_tower":
        return sum(
            _mlp(_tower_width(model, data, user), model.bottom_mlp) for user in (True, False)
        )
    features, found = len(data.features), _mlp(max(1, len(data.dense)), model.bottom_mlp)
    if model.architecture == "dcnv2":
        width = (features + 1) * model.embedding_dim
        found += model.cross_layers * (2 * model.cross_rank + 1) * width
    else:
        width = model.bottom_mlp[-1] + pairs(features)
    return found + _mlp(width, model.top_mlp)


def pairs(features: int) -> int:
    """The number of dot products among the dense arch's output and the features."""
    return (features + 1) * features // 2


def _tower_width(model: ModelConfig, data: Described, user: bool) -> int:
    """The width of a tower's inputs, of the user's or of the item's."""
    features, dense = (
        sum((name in model.user_columns) == user for name in names)
        for names in (data.features, data.dense)
    )
    return model.embedding_dim * features + dense


def _mlp(inputs: int, widths: Sequence[int]) -> int:
    """The number of weights and biases of layers."""
    found = 0
    for outputs in widths:
        found += (inputs + 1) * outputs
        inputs = outputs
    return found
