"""DLRM's dot interaction on unique rows, and its gradients, summed per row."""

from __future__ import annotations

import torch

from ecrm.kernels import check, dispatch, native
from ecrm.kernels.scatter_add import scatter_add

__all__ = ["dot_interaction", "dot_interaction_backward"]


def dot_interaction(
    dense: torch.Tensor, values: torch.Tensor, places: torch.Tensor, backend: str = "auto"
) -> torch.Tensor:
    """DLRM's interaction: a sample's dense row, then the dot products of all pairs of rows.

    A sample has one dense row and F embedding rows. Pairs are in the order of torch.triu_indices.

    Legend: B samples, F features, U unique rows of D floats.

    Args:
        dense: float32 [B, D]. May be a view with a row stride.
        values: float32 [U, D]. May be a view with a row stride.
        places: int64 [B * F], contiguous. The row of `values` for every (sample, feature).

    Returns a new float32 [B, D + F (F + 1) / 2].

    Raises TypeError or ValueError, with the numbers.
    """
    chosen, features = _checked(dense, values, places, backend)
    if chosen == "reference":
        from ecrm.kernels.dot_interaction.reference import forward

        return forward(dense, values, places)
    if chosen == "triton":
        from ecrm.kernels.dot_interaction import triton

        return triton.forward(dense, values, places, features)
    batch, width = dense.shape
    out = torch.empty(batch, width + features * (features + 1) // 2)
    room = _room(features, width)
    native.library().ecrm_dot_interaction(
        out.data_ptr(),
        out.shape[1],
        dense.data_ptr(),
        check.row_stride(dense),
        values.data_ptr(),
        check.row_stride(values),
        places.data_ptr(),
        batch,
        features,
        width,
        room.data_ptr(),
    )
    return out


def dot_interaction_backward(
    gradients: torch.Tensor,
    dense: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor,
    backend: str = "auto",
    sums: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `dense` and of `values`, from the gradients of the result of `dot_interaction`.

    The gradients of a row are summed in the order of `places`. So the bits are the same on every
    machine, but for the sign and payload of NaNs.

    Args:
        gradients: float32 [B, D + F (F + 1) / 2]. May be a view with a row stride.
        dense: As in `dot_interaction`.
        values: As in `dot_interaction`.
        places: As in `dot_interaction`.
        sums: float32 [U, D], contiguous, overwritten by the gradients of `values`. `None`: new
            memory.

    Returns float32 [B, D], new, and float32 [U, D].

    Raises TypeError or ValueError, with the numbers.
    """
    chosen, features = _checked(dense, values, places, backend)
    batch, width = dense.shape
    check.matrix("gradients", gradients, (torch.float32,))
    check.shape("gradients", gradients, (batch, width + features * (features + 1) // 2))
    if sums is None:
        sums = torch.empty(values.shape, device=values.device)
    check.matrix("sums", sums, (torch.float32,), written=True)
    check.shape("sums", sums, values.shape)
    if not sums.is_contiguous():
        raise ValueError(f"sums has strides {sums.stride()}, needed: contiguous")
    check.one_device({"sums": sums, "values": values})
    if chosen == "triton":
        from ecrm.kernels.dot_interaction import triton

        return triton.backward(gradients, dense, values, places, features, sums), sums
    seen = torch.zeros(values.shape[0], dtype=torch.uint8, device=values.device)
    if chosen == "reference":
        from ecrm.kernels.dot_interaction.reference import backward

        of_dense, of_rows = backward(gradients, dense, values, places)
        scatter_add(sums, places, of_rows.flatten(0, 1), backend, seen)
        return of_dense, _zero_unseen(sums, seen)
    of_dense, room = torch.empty(batch, width), _room(features, width)
    native.library().ecrm_dot_interaction_backward(
        of_dense.data_ptr(),
        sums.data_ptr(),
        width,
        seen.data_ptr(),
        gradients.data_ptr(),
        check.row_stride(gradients),
        dense.data_ptr(),
        check.row_stride(dense),
        values.data_ptr(),
        check.row_stride(values),
        places.data_ptr(),
        batch,
        features,
        width,
        room.data_ptr(),
    )
    return of_dense, _zero_unseen(sums, seen)


def _zero_unseen(sums: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    if not seen.all():
        sums[seen == 0] = 0
    return sums


def _checked(
    dense: torch.Tensor, values: torch.Tensor, places: torch.Tensor, backend: str
) -> tuple[str, int]:
    """Check the arguments; return the backend and F."""
    check.matrix("dense", dense, (torch.float32,))
    check.matrix("values", values, (torch.float32,))
    check.row_numbers("places", places, values.shape[0])
    check.shape("values", values, (values.shape[0], dense.shape[1]))
    device = check.one_device({"dense": dense, "values": values, "places": places})
    features, over = (
        divmod(places.shape[0], dense.shape[0]) if dense.shape[0] else (0, places.shape[0])
    )
    if over:
        raise ValueError(
            f"places has {places.shape[0]} elements, "
            f"needed: a multiple of the {dense.shape[0]} samples"
        )
    chosen = dispatch.choose("dot_interaction", backend, device)
    if chosen == "triton" and not dense.numel():
        chosen = "reference"  # there is nothing to launch
    return chosen, features


def _room(features: int, width: int) -> torch.Tensor:
    return torch.zeros(native.library().ecrm_dot_interaction_room(features, width))
