"""torch.compile sees one graph, torch.export one operator, at any batch, height and width."""
import pytest
import torch
from torch.export import Dim

from mminline.models import InLinePVT
from mminline.ops import inline_attention

from .test_op import make_inputs, relative_error
from .test_pvt import NARROW


def test_the_operator_compiles_in_one_graph():
    inputs, settings = make_inputs('tall_prefix', torch.float32, requires_grad=True)

    def attend(q, k, v, weight):
        return inline_attention(q, k, v, local_weight=weight, **settings)

    out = attend(*inputs)
    compiled = torch.compile(attend, fullgraph=True, backend='aot_eager')(*inputs)
    assert relative_error(compiled, out) < 1e-6
    grads, compiled_grads = (torch.autograd.grad(result.square().sum(), inputs) for result in (out, compiled))
    for name, grad, expected in zip(('q', 'k', 'v', 'local_weight'), compiled_grads, grads):
        assert relative_error(grad, expected) < 1e-6, name


@pytest.fixture(scope='module')
def backbone():
    torch.manual_seed(0)
    return InLinePVT({**NARROW, 'depths': (1, 1, 1, 1)}, pretrain_img_size=64).eval()


def close(maps, expected):
    return all(relative_error(a, b) < 1e-5 for a, b in zip(maps, expected))


@pytest.mark.slow
def test_a_backbone_compiles_in_one_graph_with_dynamic_sizes(backbone):
    compiled = torch.compile(backbone, fullgraph=True, dynamic=True, backend='aot_eager')
    with torch.no_grad():
        for size in ((2, 3, 128, 192), (2, 3, 160, 96)):
            images = torch.randn(size)
            assert close(compiled(images), backbone(images)), size


@pytest.mark.slow
def test_a_backbone_exports_with_dynamic_batch_height_and_width(backbone):
    height, width = Dim('height', min=2, max=64), Dim('width', min=2, max=64)
    shapes = ({0: Dim('batch', min=1, max=64), 2: 32 * height, 3: 32 * width},)
    program = torch.export.export(backbone, (torch.randn(2, 3, 128, 192),), dynamic_shapes=shapes)
    names = [str(node.target) for node in program.graph.nodes]
    assert sum('mminline.inline_attention' in name for name in names) == 4
    with torch.no_grad():
        for size in ((2, 3, 128, 192), (3, 3, 96, 160)):
            images = torch.randn(size)
            assert close(program.module()(images), backbone(images)), size
