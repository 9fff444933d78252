"""The CUDA kernels of InLine attention, in Triton; ``cuda.py`` launches them.

Four kernels: :func:`statistics_kernel` and :func:`merge_kernel` give the means and the covariance of two
token tensors, :func:`apply_kernel` the output, :func:`gradient_kernel` the gradients. Each program works on
one head of one image. Nothing is summed through atomics, so that equal inputs give equal bits, and
everything is summed in float32 whatever the inputs are.

Tokens are (B, N, C) with unit stride over channels; other strides are free. Sizes are not specialised, so
that a new image size compiles nothing; strides are (only in whether 16 divides them), since wide memory
accesses depend on it. Token offsets are 64-bit: N times the stride may pass 2^31.
"""
import triton
import triton.language as tl

# What differs from image to image, or from stage to stage, must not trigger a compilation.
SIZES = ('num_tokens', 'num_heads', 'num_splits', 'tokens_per_split', 'height', 'width', 'num_prefix_tokens',
         'tiles_per_row', 'num_tiles')


@triton.jit(do_not_specialize=[name for name in SIZES if name in ('num_tokens', 'num_heads', 'num_splits', 'tokens_per_split')])
def statistics_kernel(x_ptr, y_ptr, count_ptr, mean_x_ptr, mean_y_ptr, product_ptr,
                      num_tokens, num_heads, num_splits, tokens_per_split,
                      stride_x_image, stride_x_token, stride_y_image, stride_y_token,
                      HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
                      PRECISION: tl.constexpr):
    """Give count, mean(x), mean(y) and (x - mean(x))^T (y - mean(y)) of one stretch of tokens.

    Every tile of BLOCK_N tokens is centred on its own means and merged into the running statistics with
    Chan's formula: no difference of large numbers, however far the means are from zero.
    """
    program = tl.program_id(0)
    head = program % num_heads
    split = program // num_heads % num_splits
    image = (program // num_heads // num_splits).to(tl.int64)
    pair = image * num_heads + head
    channels = tl.arange(0, BLOCK_D)
    is_channel = channels < HEAD_DIM
    x_ptr += image * stride_x_image + head * HEAD_DIM
    y_ptr += image * stride_y_image + head * HEAD_DIM

    count = 0.0
    mean_x = tl.zeros([BLOCK_D], tl.float32)
    mean_y = tl.zeros([BLOCK_D], tl.float32)
    product = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, num_tokens)
    for start in range(first, last, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        is_token = tokens < last
        mask = is_token[:, None] & is_channel[None, :]
        rows = tokens.to(tl.int64)[:, None]
        x = tl.load(x_ptr + rows * stride_x_token + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + rows * stride_y_token + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        tile_count = tl.sum(is_token.to(tl.float32))
        tile_mean_x = tl.sum(x, axis=0) / tile_count
        tile_mean_y = tl.sum(y, axis=0) / tile_count
        x = tl.where(mask, x - tile_mean_x[None, :], 0.0)
        y = tl.where(mask, y - tile_mean_y[None, :], 0.0)
        product = tl.dot(tl.trans(x), y, product, input_precision=PRECISION)
        step_x = tile_mean_x - mean_x
        step_y = tile_mean_y - mean_y
        share = tile_count / (count + tile_count)
        product += (count * share) * step_x[:, None] * step_y[None, :]
        mean_x += share * step_x
        mean_y += share * step_y
        count += tile_count

    slot = pair * num_splits + split
    tl.store(count_ptr + slot, count)
    tl.store(mean_x_ptr + slot * HEAD_DIM + channels, mean_x, mask=is_channel)
    tl.store(mean_y_ptr + slot * HEAD_DIM + channels, mean_y, mask=is_channel)
    square = channels[:, None] * HEAD_DIM + channels[None, :]
    tl.store(product_ptr + slot * HEAD_DIM * HEAD_DIM + square, product,
             mask=is_channel[:, None] & is_channel[None, :])
