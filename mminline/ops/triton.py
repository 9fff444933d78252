"""The CUDA kernels of InLine attention, in Triton; ``cuda.py`` launches them.

:func:`statistics_kernel` and :func:`merge_kernel` give the means and the cross moment of two token tensors,
:func:`apply_kernel` the output, :func:`gradient_kernel` the gradients. A program works on one head of one
image. Sums are taken in float32 whatever the inputs are, and never through atomics: equal inputs give equal
bits.

With HAS_VALID, ``valid_ptr`` holds each image's valid (rows, columns): tokens of the map outside them count for
nothing and get zeros.

Tokens are (B, N, C) with unit stride over channels and any other strides. Token offsets are 64-bit, for
N times a stride may pass 2^31. Strides are specialised in whether 16 divides them, for wide memory accesses
depend on that; sizes are not, so that another image size compiles nothing.
"""
import triton
import triton.language as tl

SIZES = ('num_heads', 'num_tokens', 'num_splits', 'split_tokens', 'num_tiles', 'tiles_per_row', 'height',
         'width', 'num_prefix_tokens')


@triton.jit
def _valid_area(valid_ptr, image, height, width, HAS_VALID: tl.constexpr):
    """Return the valid rows and columns of an image's map."""
    if HAS_VALID:
        height = tl.load(valid_ptr + 2 * image)
        width = tl.load(valid_ptr + 2 * image + 1)
    return height, width


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(
        x_ptr, y_ptr, valid_ptr, count_ptr, mean_x_ptr, mean_y_ptr, moment_ptr, x_image_stride, x_token_stride,
        y_image_stride, y_token_stride, num_heads, num_tokens, num_splits, split_tokens, width, num_prefix_tokens,
        HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, HAS_VALID: tl.constexpr,
        PRECISION: tl.constexpr):
    """Store count, mean(x), mean(y) and sum of (x - mean(x))^T (y - mean(y)) of each stretch of tokens.

    Each tile of BLOCK_N tokens is centred on its own means and merged with Chan's formula: no difference of
    large sums, however far the means are from zero.
    """
    program = tl.program_id(0)
    head = program % num_heads
    split = program // num_heads % num_splits
    image = (program // num_heads // num_splits).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_DIM
    x_ptr += image * x_image_stride + head * HEAD_DIM
    y_ptr += image * y_image_stride + head * HEAD_DIM

    valid_height, valid_width = _valid_area(valid_ptr, image, num_tokens, width, HAS_VALID)
    count = 0.0
    mean_x = tl.zeros([BLOCK_D], tl.float32)
    mean_y = tl.zeros([BLOCK_D], tl.float32)
    moment = tl.zeros([BLOCK_D, BLOCK_D], tl.float32)
    start = split * split_tokens
    stop = tl.minimum(start + split_tokens, num_tokens)
    for tile_start in range(start, stop, BLOCK_N):
        token = tile_start + tl.arange(0, BLOCK_N)
        is_token = token < stop
        if HAS_VALID:
            place = token - num_prefix_tokens
            is_token &= (place < 0) | ((place // width < valid_height) & (place % width < valid_width))
        mask = is_token[:, None] & in_head[None, :]
        row = token.to(tl.int64)[:, None]
        x = tl.load(x_ptr + row * x_token_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + row * y_token_stride + channel[None, :], mask=mask, other=0.0).to(tl.float32)
        tile_count = tl.sum(is_token.to(tl.float32))
        divisor = tl.maximum(tile_count, 1.0)  # a tile may hold padding only
        tile_mean_x = tl.sum(x, axis=0) / divisor
        tile_mean_y = tl.sum(y, axis=0) / divisor
        x = tl.where(is_token[:, None], x - tile_mean_x[None, :], 0.0)
        y -= tile_mean_y[None, :]
        moment = tl.dot(tl.trans(x), y, moment, input_precision=PRECISION)
        step_x = tile_mean_x - mean_x
        step_y = tile_mean_y - mean_y
        share = tile_count / tl.maximum(count + tile_count, 1.0)
        moment += (count * share) * step_x[:, None] * step_y[None, :]
        mean_x += share * step_x
        mean_y += share * step_y
        count += tile_count

    slot = (image * num_heads + head) * num_splits + split
    tl.store(count_ptr + slot, count)
    tl.store(mean_x_ptr + slot * HEAD_DIM + channel, mean_x, mask=in_head)
    tl.store(mean_y_ptr + slot * HEAD_DIM + channel, mean_y, mask=in_head)
    tl.store(moment_ptr + slot * HEAD_DIM * HEAD_DIM + channel[:, None] * HEAD_DIM + channel[None, :], moment,
             mask=in_head[:, None] & in_head[None, :])


@triton.jit(do_not_specialize=SIZES)
def merge_kernel(
        count_ptr, mean_x_ptr, mean_y_ptr, moment_ptr, merged_mean_x_ptr, merged_mean_y_ptr,
        merged_moment_ptr, factor, num_splits, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CENTER: tl.constexpr):
    """Merge the splits of one image and head: Chan's formula for all of them at once.

    The merged moment, times ``factor`` over the number of tokens, is about the merged means with CENTER, else about
    zero. A program gives BLOCK_ROWS rows of it.
    """
    NUM_BLOCKS: tl.constexpr = BLOCK_D // BLOCK_ROWS
    program = tl.program_id(0)
    block = program % NUM_BLOCKS
    pair = (program // NUM_BLOCKS).to(tl.int64)
    row = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    in_rows = row < HEAD_DIM
    in_columns = column < HEAD_DIM

    count = 0.0
    mean_x = tl.zeros([BLOCK_ROWS], tl.float32)
    mean_y = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        slot = pair * num_splits + split
        is_split = split < num_splits
        split_count = tl.load(count_ptr + slot, mask=is_split, other=0.0)
        split_mean_x = tl.load(mean_x_ptr + slot[:, None] * HEAD_DIM + row[None, :],
                               mask=is_split[:, None] & in_rows[None, :], other=0.0)
        split_mean_y = tl.load(mean_y_ptr + slot[:, None] * HEAD_DIM + column[None, :],
                               mask=is_split[:, None] & in_columns[None, :], other=0.0)
        count += tl.sum(split_count)
        mean_x += tl.sum(split_count[:, None] * split_mean_x, axis=0)
        mean_y += tl.sum(split_count[:, None] * split_mean_y, axis=0)
    mean_x /= count
    mean_y /= count
    tl.store(merged_mean_x_ptr + pair * HEAD_DIM + row, mean_x, mask=in_rows)
    if block == 0:
        tl.store(merged_mean_y_ptr + pair * HEAD_DIM + column, mean_y, mask=in_columns)

    moment = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    for start in range(0, num_splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        slot = pair * num_splits + split
        is_split = split < num_splits
        split_count = tl.load(count_ptr + slot, mask=is_split, other=0.0)
        step_x = tl.load(mean_x_ptr + slot[:, None] * HEAD_DIM + row[None, :],
                         mask=is_split[:, None] & in_rows[None, :], other=0.0)
        step_y = tl.load(mean_y_ptr + slot[:, None] * HEAD_DIM + column[None, :],
                         mask=is_split[:, None] & in_columns[None, :], other=0.0)
        if CENTER:
            step_x -= mean_x[None, :]
            step_y -= mean_y[None, :]
        entry = slot[:, None, None] * (HEAD_DIM * HEAD_DIM) + row[None, :, None] * HEAD_DIM + column[None, None, :]
        mask = is_split[:, None, None] & in_rows[None, :, None] & in_columns[None, None, :]
        split_moment = tl.load(moment_ptr + entry, mask=mask, other=0.0)
        split_moment += split_count[:, None, None] * step_x[:, :, None] * step_y[:, None, :]
        moment += tl.sum(split_moment, axis=0)
    tl.store(merged_moment_ptr + pair * (HEAD_DIM * HEAD_DIM) + row[:, None] * HEAD_DIM + column[None, :],
             moment * (factor / count), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _tile_tokens(tile, tiles_per_row, height, width, valid_height, valid_width, num_prefix_tokens,
                 BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr):
    """Return index, row and column of a tile's tokens, and three masks: is a token, is a valid one, is a valid one of
    the map.

    Tiles of BLOCK_H x BLOCK_W tokens cover the map: most 3x3 neighbours are then in the same tile, and memory
    is read about once. The last tiles hold the prefix tokens.
    """
    position = tl.arange(0, BLOCK_H * BLOCK_W)
    row = tile // tiles_per_row * BLOCK_H + position // BLOCK_W
    column = tile % tiles_per_row * BLOCK_W + position % BLOCK_W
    on_map = (row < height) & (column < width)
    prefix_tile = tile - tl.cdiv(height, BLOCK_H) * tiles_per_row
    prefix_token = prefix_tile * (BLOCK_H * BLOCK_W) + position
    is_prefix = (prefix_token >= 0) & (prefix_token < num_prefix_tokens)
    token = tl.where(is_prefix, prefix_token, num_prefix_tokens + row * width + column)
    is_valid = (row < valid_height) & (column < valid_width)
    return token, row, column, on_map | is_prefix, is_valid | is_prefix, is_valid


@triton.jit(do_not_specialize=SIZES)
def apply_kernel(
        q_ptr, v_ptr, valid_ptr, weight_ptr, covariance_ptr, mean_v_ptr, out_ptr, scale, q_image_stride, q_token_stride,
        v_image_stride, v_token_stride, num_heads, num_tokens, num_tiles, tiles_per_row, height, width,
        num_prefix_tokens, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
        BLOCK_W: tl.constexpr, HAS_LOCAL: tl.constexpr, HAS_VALID: tl.constexpr, PRECISION: tl.constexpr):
    """Store mean(v) + scale * q . Cov + the 3x3 local term of one tile of tokens."""
    program = tl.program_id(0)
    head = program % num_heads
    tile = program // num_heads % num_tiles
    image = (program // num_heads // num_tiles).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_DIM
    valid_height, valid_width = _valid_area(valid_ptr, image, height, width, HAS_VALID)
    token, row, column, is_token, is_valid, is_valid_on_map = _tile_tokens(
        tile, tiles_per_row, height, width, valid_height, valid_width, num_prefix_tokens, BLOCK_H, BLOCK_W)
    token = token.to(tl.int64)[:, None]
    store_mask = is_token[:, None] & in_head[None, :]
    mask = is_valid[:, None] & in_head[None, :]
    out_ptr += ((image * num_tokens + token) * num_heads + head) * HEAD_DIM + channel[None, :]
    q_ptr += image * q_image_stride + head * HEAD_DIM + token * q_token_stride + channel[None, :]
    v_ptr += image * v_image_stride + head * HEAD_DIM + token * v_token_stride + channel[None, :]

    pair = image * num_heads + head
    square = channel[:, None] * HEAD_DIM + channel[None, :]
    covariance = tl.load(covariance_ptr + pair * (HEAD_DIM * HEAD_DIM) + square,
                         mask=in_head[:, None] & in_head[None, :], other=0.0)
    mean_v = tl.load(mean_v_ptr + pair * HEAD_DIM + channel, mask=in_head, other=0.0)
    q = tl.load(q_ptr, mask=mask, other=0.0).to(tl.float32)
    out = tl.dot(q, scale * covariance, input_precision=PRECISION) + mean_v[None, :]
    if HAS_LOCAL:
        weight_ptr += (image * 9 * num_heads + head) * HEAD_DIM + channel
        for tap in tl.static_range(9):
            down = tap // 3 - 1
            right = tap % 3 - 1
            inside = is_valid_on_map & (row + down >= 0) & (row + down < valid_height) \
                & (column + right >= 0) & (column + right < valid_width)
            neighbour = tl.load(v_ptr + (down * width + right).to(tl.int64) * v_token_stride,
                                mask=inside[:, None] & in_head[None, :], other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + tap * num_heads * HEAD_DIM, mask=in_head, other=0.0).to(tl.float32)
            out += weight[None, :] * neighbour
    if HAS_VALID:
        out = tl.where(mask, out, 0.0)
    tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=store_mask)


@triton.jit(do_not_specialize=SIZES)
def gradient_kernel(
        grad_ptr, k_ptr, v_ptr, valid_ptr, weight_ptr, covariance_ptr, mean_k_ptr, mean_v_ptr, grad_covariance_ptr,
        mean_grad_ptr, grad_q_ptr, grad_k_ptr, grad_v_ptr, grad_weight_ptr, scale, grad_image_stride,
        grad_token_stride, k_image_stride, k_token_stride, v_image_stride, v_token_stride, num_heads,
        num_tokens, num_tiles, tiles_per_row, height, width, num_prefix_tokens, HEAD_DIM: tl.constexpr,
        BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, HAS_LOCAL: tl.constexpr,
        HAS_VALID: tl.constexpr, PRECISION: tl.constexpr):
    """Store the gradients of q, k and v of one tile, and the tile's share of the gradient of the 3x3 weights.

    ``grad_covariance`` is scale / N * sum of q^T grad, ``mean_grad`` the mean of grad (zero without centring).
    """
    program = tl.program_id(0)
    head = program % num_heads
    tile = program // num_heads % num_tiles
    image = (program // num_heads // num_tiles).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    in_head = channel < HEAD_DIM
    valid_height, valid_width = _valid_area(valid_ptr, image, height, width, HAS_VALID)
    token, row, column, is_token, is_valid, is_valid_on_map = _tile_tokens(
        tile, tiles_per_row, height, width, valid_height, valid_width, num_prefix_tokens, BLOCK_H, BLOCK_W)
    token = token.to(tl.int64)[:, None]
    store_mask = is_token[:, None] & in_head[None, :]
    mask = is_valid[:, None] & in_head[None, :]
    out = ((image * num_tokens + token) * num_heads + head) * HEAD_DIM + channel[None, :]
    grad_ptr += image * grad_image_stride + head * HEAD_DIM + token * grad_token_stride + channel[None, :]
    k_ptr += image * k_image_stride + head * HEAD_DIM + token * k_token_stride + channel[None, :]
    v_ptr += image * v_image_stride + head * HEAD_DIM + token * v_token_stride + channel[None, :]

    pair = image * num_heads + head
    square = pair * (HEAD_DIM * HEAD_DIM) + channel[:, None] * HEAD_DIM + channel[None, :]
    square_mask = in_head[:, None] & in_head[None, :]
    vector = pair * HEAD_DIM + channel

    grad = tl.load(grad_ptr, mask=mask, other=0.0).to(tl.float32)
    covariance = tl.load(covariance_ptr + square, mask=square_mask, other=0.0)
    grad_q = tl.dot(grad, tl.trans(scale * covariance), input_precision=PRECISION)
    tl.store(grad_q_ptr + out, grad_q.to(grad_q_ptr.dtype.element_ty), mask=store_mask)

    v = tl.load(v_ptr, mask=mask, other=0.0).to(tl.float32)
    mean_v = tl.load(mean_v_ptr + vector, mask=in_head, other=0.0)
    grad_covariance = tl.load(grad_covariance_ptr + square, mask=square_mask, other=0.0)
    grad_k = tl.dot(v - mean_v[None, :], tl.trans(grad_covariance), input_precision=PRECISION)
    if HAS_VALID:
        grad_k = tl.where(mask, grad_k, 0.0)
    tl.store(grad_k_ptr + out, grad_k.to(grad_k_ptr.dtype.element_ty), mask=store_mask)

    k = tl.load(k_ptr, mask=mask, other=0.0).to(tl.float32)
    mean_k = tl.load(mean_k_ptr + vector, mask=in_head, other=0.0)
    mean_grad = tl.load(mean_grad_ptr + vector, mask=in_head, other=0.0)
    grad_v = tl.dot(k - mean_k[None, :], grad_covariance, input_precision=PRECISION) + mean_grad[None, :]
    if HAS_LOCAL:
        # Value j went through tap t into the output of token j - t.
        weight_ptr += (image * 9 * num_heads + head) * HEAD_DIM + channel
        grad_weight_ptr += ((image * num_tiles + tile) * 9 * num_heads + head) * HEAD_DIM + channel
        for tap in tl.static_range(9):
            down = tap // 3 - 1
            right = tap % 3 - 1
            inside = is_valid_on_map & (row - down >= 0) & (row - down < valid_height) \
                & (column - right >= 0) & (column - right < valid_width)
            neighbour = tl.load(grad_ptr - (down * width + right).to(tl.int64) * grad_token_stride,
                                mask=inside[:, None] & in_head[None, :], other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + tap * num_heads * HEAD_DIM, mask=in_head, other=0.0).to(tl.float32)
            grad_v += weight[None, :] * neighbour
            tl.store(grad_weight_ptr + tap * num_heads * HEAD_DIM, tl.sum(v * neighbour, axis=0), mask=in_head)
    if HAS_VALID:
        grad_v = tl.where(mask, grad_v, 0.0)
    tl.store(grad_v_ptr + out, grad_v.to(grad_v_ptr.dtype.element_ty), mask=store_mask)
