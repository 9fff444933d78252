"""Whether different queries get different weights: plain linear, softmax and inline attention compared.

Plain linear attention weights the keys by ``phi(q) . phi(k)`` and divides by the sum over all keys. Of ``phi(q)`` only
the direction is left: queries whose features are collinear, however long, get the same weights. The attention is not
injective, and the layer cannot tell these queries apart. Softmax attention is injective, and InLine attention is, since
it subtracts the mean instead of dividing by the sum (`Bridging the Divide <https://arxiv.org/abs/2412.06590>`_).
"""
from pathlib import Path
from typing import Callable, Dict, NamedTuple, Sequence, Tuple

import numpy as np
import torch
from torch import Tensor

from mminline.models.layers.attention import split_heads
from mminline.ops.reference import inline_attention_weights

from .attention_maps import Call, linear_attention_weights, project, softmax_attention_weights

# Weights of queries (..., Q, head_dim) over keys (..., K, head_dim), by the kind of attention.
WEIGHTS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    'linear': linear_attention_weights,
    'softmax': softmax_attention_weights,
    'inline': lambda q, k: inline_attention_weights(q, k, q.shape[-1] ** -0.5),
}
TITLES = {'linear': 'linear (features elu + 1)', 'softmax': 'softmax', 'inline': 'inline, global part'}
FACTORS = (1, 2, 4, 8)  # of the features of the queries in the picture
NUM_KEYS = 8  # of the picture
QUERY_DIFFERENCE = 0.1
MAX_QUERIES = 512


class Count(NamedTuple):
    """How many queries of a block collide under a kind of attention, over all heads."""
    attention: str
    colliding: int
    queries: int
    tolerance: float

    @property
    def share(self) -> float:
        return self.colliding / self.queries


# ---- the point ----------------------------------------------------------------------------------------
def collinear_queries(query: Tensor, factors: Sequence[float]) -> Tensor:
    """Return queries whose features elu + 1 are multiples of one query's, (len(factors), head_dim).

    Args:
        query: (head_dim,).
        factors: Positive numbers.
    """
    features = torch.nn.functional.elu(query) + 1
    features = torch.as_tensor(factors, dtype=query.dtype)[:, None] * features
    return torch.where(features > 1, features - 1, features.log())  # undoes elu + 1


def example() -> Tuple[Tensor, Tensor]:
    """Return the queries (4, 4) and keys (8, 4) of the picture."""
    generator = torch.Generator().manual_seed(1)
    query, keys = torch.randn(4, generator=generator), torch.randn(NUM_KEYS, 4, generator=generator)
    return collinear_queries(query, FACTORS), keys


# ---- an image -----------------------------------------------------------------------------------------
def count_collisions(q: Tensor, weights: Tensor, tolerance: float) -> int:
    """Count the queries that collide with another one, over all heads.

    Two queries of one head collide if their weights are nearly the same, and they are not: the distance of their
    weights is at most ``tolerance`` of the larger norm of the two, while the distance of the queries is more than
    ``QUERY_DIFFERENCE`` of theirs.

    Args:
        q: Queries, (num_heads, Q, head_dim).
        weights: Of these queries over the keys, (num_heads, Q, K).
        tolerance: Relative distance of weights that are nearly the same.
    """
    colliding = (_relative_distances(weights) <= tolerance) & (_relative_distances(q) > QUERY_DIFFERENCE)
    return int(colliding.any(dim=-1).sum())


def _relative_distances(x: Tensor) -> Tensor:
    """Return the distances between vectors (..., Q, D), as parts of the larger norm of the two, (..., Q, Q)."""
    norms = x.norm(dim=-1)
    # Differences, not inner products, which lose small distances.
    distances = torch.cdist(x, x, compute_mode='donot_use_mm_for_euclid_dist')
    return distances / torch.maximum(norms.unsqueeze(-1), norms.unsqueeze(-2)).clamp_min(torch.finfo(x.dtype).tiny)


@torch.no_grad()
def count_in_calls(calls: Sequence[Call], tolerance: float) -> list[Count]:
    """Count colliding queries of a block on an image, with the block's queries and keys under each kind of attention.

    Softmax windows count as one map here, and of a large map ``MAX_QUERIES`` tokens in even steps are the queries.

    Args:
        calls: From :func:`mminline.analysis.attention_maps.record_calls`.
        tolerance: As of :func:`count_collisions`.
    """
    colliding, queries = dict.fromkeys(WEIGHTS, 0), 0
    for call in calls:
        all_q, k, _ = project(call.layer, call.arguments)
        q = all_q[:, torch.linspace(0, all_q.shape[1] - 1, min(all_q.shape[1], MAX_QUERIES)).round().long()]
        q, k = (split_heads(part, call.layer.num_heads)[0] for part in (q, k))
        queries += q.shape[0] * q.shape[1]
        for head_q, head_k in zip(q.split(1), k.split(1)):
            for kind, weigh in WEIGHTS.items():
                colliding[kind] += count_collisions(head_q, weigh(head_q, head_k), tolerance)
    return [Count(kind, number, queries, tolerance) for kind, number in colliding.items()]


# ---- for the reader -----------------------------------------------------------------------------------
def draw(counts: Sequence[Count], where: str, out_file: Path) -> None:
    """Draw the weights of collinear queries under each kind of attention, and below them the counts.

    Args:
        counts: From :func:`count_in_calls`.
        where: What the counts are of, for the title.
        out_file: The picture to write.
    """
    from matplotlib.figure import Figure

    queries, keys = example()
    figure = Figure(figsize=(13, 7.5), layout='constrained')
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 2))
    top.suptitle('Weights of four different queries whose features elu(q) + 1 lie on one line')
    places = np.arange(NUM_KEYS)
    width = 0.8 / len(FACTORS)
    panels = top.subplots(1, len(WEIGHTS))
    for axes, (kind, weigh) in zip(panels, WEIGHTS.items()):
        for index, (factor, weights) in enumerate(zip(FACTORS, weigh(queries, keys))):
            axes.bar(places + (index - (len(FACTORS) - 1) / 2) * width, weights, width, label=f'features x {factor}',
                     color=f'C{index}')
        axes.axhline(0, color='black', linewidth=0.8)
        spread = float(torch.cdist(*2 * [weigh(queries, keys)]).max())
        same = 'all the same' if spread < 1e-5 else 'all different'
        axes.set(title=f'{TITLES[kind]}: {same}', xlabel='key', ylabel='weight', xticks=places)
        axes.spines[['top', 'right']].set_visible(False)
    top.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=len(FACTORS), frameon=False)

    axes = bottom.subplots()
    bars = axes.barh([TITLES[count.attention] for count in counts], [100 * count.share for count in counts],
                     color='tab:gray')
    axes.bar_label(bars, [f'{count.colliding:,} of {count.queries:,}' for count in counts], padding=4)
    axes.invert_yaxis()
    axes.set(xlim=(0, 115), xticks=range(0, 101, 20), xlabel=(
        "colliding queries, % (the block's queries and keys under each kind of attention)"), title=(
        f'{where}: queries with the weights of another one (to {counts[0].tolerance:.0%}) that differs '
        f'by more than {QUERY_DIFFERENCE:.0%}'))
    axes.spines[['top', 'right']].set_visible(False)
    figure.savefig(out_file, dpi=110)
