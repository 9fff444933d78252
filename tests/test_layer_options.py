"""The local term and the centring can be left out of the inline layers of every family."""
import pytest
import torch

from mminline.models import InLineCSwin, InLineDeiT, InLinePVT, InLineSwin
from mminline.models.pretrained import load_pretrained

PYRAMID = dict(embed_dims=(16, 32, 32, 32), num_heads=(2, 2, 2, 2), depths=(1, 1, 1, 1))
KINDS = dict(attn_types=('inline', 'linear', 'softmax', 'inline'))
FAMILIES = {
    'pvt': lambda **options: InLinePVT({**PYRAMID, 'mlp_ratios': (2, 2, 2, 2)}, **KINDS, **options),
    'swin': lambda **options: InLineSwin({**PYRAMID, **KINDS}, **options),
    'cswin': lambda **options: InLineCSwin({**PYRAMID, **KINDS}, **options),
    'deit': lambda **options: InLineDeiT(dict(embed_dims=32, num_heads=2, depth=4, pretrain_img_size=64),
                                         attn_types=(KINDS['attn_types'],), out_indices=(3,), **options),
}


def build(family, **options):
    torch.manual_seed(0)
    return FAMILIES[family](**options).eval()


@pytest.mark.parametrize('family', FAMILIES)
def test_without_local_term(family, tmp_path):
    whole = build(family)
    torch.save(whole.state_dict(), tmp_path / 'whole.pth')
    without = build(family, local_term=False)
    report = load_pretrained(without, str(tmp_path / 'whole.pth'), min_matched=1)

    kernels = [name for name in whole.state_dict() if '.residual.' in name]
    assert len(kernels) == 2 * 4  # two inline blocks, two convolutions each
    assert sorted(report.unexpected) == sorted(kernels) and report.missing == ()
    # Kernels of zeros are no local term, whatever the rest of the weights.
    whole.load_state_dict({name: torch.zeros(()).expand_as(whole.get_parameter(name)) for name in kernels},
                          strict=False)
    images = torch.randn(1, 3, 70, 90)
    torch.testing.assert_close(without(images), whole(images))


@pytest.mark.parametrize('family', FAMILIES)
def test_without_centring(family):
    whole, without = (build(family, center=center).double() for center in (True, False))
    assert whole.state_dict().keys() == without.state_dict().keys()
    images = torch.randn(1, 3, 70, 90, dtype=torch.float64)
    for with_means, without_means in zip(whole(images), without(images)):
        assert (with_means - without_means).norm() > 1e-6 * with_means.norm()
