"""dot_interaction and its gradients: bit for bit the definition, and torch's up to rounding."""

import pytest
import torch

from ecrm.kernels import native
from ecrm.kernels.dot_interaction import dot_interaction, dot_interaction_backward


@pytest.fixture(params=native.supported_instruction_sets())
def forced(request):
    with native.forced(request.param):
        yield request.param


def drawn(batch: int, features: int, dim: int, unique: int = 11, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, dim, generator=generator),
        torch.randn(unique, dim, generator=generator),
        torch.randint(0, unique, (batch * features,), generator=generator),
    )


def upstream(batch: int, features: int, dim: int) -> torch.Tensor:
    return torch.randn(
        batch, dim + features * (features + 1) // 2, generator=torch.Generator().manual_seed(1)
    )


SIZES = [
    (5, 26, 64),
    (3, 26, 128),
    (4, 1, 1),
    (2, 2, 3),
    (3, 7, 15),
    (3, 4, 16),
    (2, 5, 17),
    (2, 9, 100),
    (1, 3, 1024),
    (7, 30, 8),
]


@pytest.mark.parametrize(("batch", "features", "dim"), SIZES)
def test_every_set_gives_the_bits_of_the_definition(forced, batch, features, dim):
    given, gradients = drawn(batch, features, dim), upstream(batch, features, dim)
    assert torch.equal(dot_interaction(*given), dot_interaction(*given, backend="reference"))
    for mine, expected in zip(
        dot_interaction_backward(gradients, *given),
        dot_interaction_backward(gradients, *given, backend="reference"),
        strict=True,
    ):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize(("batch", "features", "dim"), SIZES)
def test_it_is_what_torch_computes(batch, features, dim):
    dense, values, places = drawn(batch, features, dim)
    gradients = upstream(batch, features, dim)
    for leaf in (dense, values):
        leaf.requires_grad_()
    rows = torch.cat((dense.unsqueeze(1), values[places].view(batch, features, dim)), dim=1)
    first, second = torch.triu_indices(features + 1, features + 1, offset=1)
    out = torch.cat((dense, torch.bmm(rows, rows.mT)[:, first, second]), dim=1)
    torch.testing.assert_close(
        dot_interaction(dense.detach(), values.detach(), places), out.detach(), rtol=1e-5, atol=1e-4
    )
    expected = torch.autograd.grad(out, (dense, values), gradients)
    mine = dot_interaction_backward(gradients, dense.detach(), values.detach(), places)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4)


def test_views_with_a_row_stride_and_a_row_that_is_not_used(forced):
    dense, values, places = drawn(3, 4, 20, unique=6)
    places.clamp_(max=4)
    wide = [torch.full((one.shape[0], 33), float("nan")) for one in (dense, values)]
    views = [storage[:, 5:25] for storage in wide]
    for view, one in zip(views, (dense, values), strict=True):
        view.copy_(one)
    gradients = torch.full((3, 40), float("nan"))
    gradients[:, 3:33] = upstream(3, 4, 20)
    assert torch.equal(dot_interaction(*views, places), dot_interaction(dense, values, places))
    mine = dot_interaction_backward(gradients[:, 3:33], *views, places)
    expected = dot_interaction_backward(upstream(3, 4, 20), dense, values, places)
    assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    used = torch.zeros(6, dtype=torch.bool)
    used[places] = True
    assert not used[5] and torch.equal((mine[1] != 0).any(dim=1), used)


def test_a_row_that_is_infinite_spoils_only_what_it_is_in(forced):
    """No product with it is made up, as a zero times it would be."""
    dense, values, _ = drawn(2, 2, 8, unique=4)
    values[3] = float("inf")
    places = torch.tensor([0, 1, 2, 3])
    of_dense, sums = dot_interaction_backward(upstream(2, 2, 8), dense, values, places)
    assert (
        bool(sums[3].isfinite().all())
        and bool(of_dense[0].isfinite().all())
        and bool(sums[:2].isfinite().all())
    )


def test_nothing_to_do():
    assert dot_interaction(
        torch.zeros(0, 4), torch.zeros(3, 4), torch.zeros(0, dtype=torch.int64)
    ).shape == (0, 4)
    alone = torch.ones(2, 4)
    assert torch.equal(
        dot_interaction(alone, torch.zeros(3, 4), torch.zeros(0, dtype=torch.int64)), alone
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"places": torch.tensor([0, 1, 2, 9])}, ValueError, r"places\[3\] is 9, outside 0..2"),
        (
            {"places": torch.tensor([0, 1, 2])},
            ValueError,
            "places has 3 elements, needed: a multiple of the 2 samples",
        ),
        ({"values": torch.ones(3, 5)}, ValueError, r"values has shape \[3, 5\], needed: \[3, 4\]"),
        ({"dense": torch.ones(2, 4).double()}, TypeError, "dense is torch.float64"),
    ],
)
def test_wrong_arguments_are_refused(change, error, message):
    given = {
        "dense": torch.ones(2, 4),
        "values": torch.ones(3, 4),
        "places": torch.tensor([0, 1, 2, 0]),
    } | change
    with pytest.raises(error, match=message):
        dot_interaction(**given)
    with pytest.raises(error, match=message):
        dot_interaction_backward(torch.ones(2, 7), **given)


def test_gradients_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"gradients has shape \[2, 6\], needed: \[2, 7\]"):
        dot_interaction_backward(
            torch.ones(2, 6), torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 1, 2, 0])
        )


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradients_of_rows_are_summed_where_they_are_wanted(backend):
    given = (
        upstream(3, 2, 4),
        torch.ones(3, 4),
        torch.randn(5, 4),
        torch.tensor([0, 1, 2, 0, 4, 4]),
    )
    room = torch.full((5, 4), torch.nan)  # row 3 is nobody's
    _, sums = dot_interaction_backward(*given, backend=backend, sums=room)
    assert sums is room and torch.equal(room, dot_interaction_backward(*given, backend=backend)[1])
    for wrong, message in (
        (torch.ones(4, 4), r"sums has shape \[4, 4\], needed: \[5, 4\]"),
        (torch.ones(5, 8)[:, :4], "sums has strides"),
    ):
        with pytest.raises(ValueError, match=message):
            dot_interaction_backward(*given, backend=backend, sums=wrong)
