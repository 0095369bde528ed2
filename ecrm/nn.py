"""Modules for a user's own models."""

from __future__ import annotations

from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ecrm import ops
from ecrm.base.errors import UsageError
from ecrm.tables import collections

__all__ = ["DotInteraction"]


class DotInteraction(nn.Module):
    """DLRM's dot interaction, in the place of TorchRec's InteractionArch, by `dot_interaction`.

    With a `collection` of the model it also takes the ids themselves. Inside a session, with one id
    per bag and the same optimizer for all tables, it multiplies the fetched rows and pools nothing.
    Elsewhere it pools like the collection. The collection stays in its place in the model, and is
    no part of this module.

    Under `torch.autocast`, inputs of 16 bits become float32 first.

    Legend: B samples, F features, D floats of a row.
    """

    def __init__(self, collection: EmbeddingBagCollection | None = None) -> None:
        super().__init__()
        self._collection = (collection,)  # within a tuple it is no submodule

    def forward(self, dense: Tensor, sparse: Tensor | KeyedJaggedTensor) -> Tensor:
        """The interaction, float32 [B, D + F (F + 1) / 2].

        Args:
            dense: float32 [B, D].
            sparse: pooled rows, float32 [B, F, D], or the ids of the collection's features.

        Raises UsageError for ids without a collection, and for tables of another width than D.
        """
        if isinstance(sparse, Tensor):
            return ops.dot_interaction(dense, sparse)
        (collection,) = self._collection
        if collection is None:
            raise UsageError(
                "DotInteraction got ids, and has no collection",
                otherwise="make it by DotInteraction(collection), or give it pooled rows",
            )
        widths = {config.embedding_dim for config in collection.embedding_bag_configs()}
        if widths != {dense.shape[1]}:
            raise UsageError(
                f"DotInteraction: tables have rows of {sorted(widths)} floats, dense rows "
                f"{dense.shape[1]}",
                otherwise="give all the same number",
            )
        if isinstance(collection, collections.EmbeddingBagCollection):
            found = collection.rows_of_single_ids(sparse)
            if found is not None:
                return ops.interact(dense, *found)
        pooled, width = collection(sparse).values(), dense.shape[1]
        return ops.dot_interaction(dense, pooled.view(len(dense), pooled.shape[1] // width, width))
