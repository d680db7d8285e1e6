"""The selective scan of Mamba-2 over a prompt on a card: the arithmetic of `nemolab.engine.mamba.scan` in fewer, larger
products.

What happens within chunks of tokens is computed for several chunks at once. From chunk to chunk the state goes by four
launches, all heads of a group as one matrix. Everything float32; sums of log decay, whose differences count, float64.
"""

from __future__ import annotations

import torch

from nemolab.engine.mamba import CHUNK

CHUNKS = 4  # worked on at once: bounds the scratch memory, see `scratch_bytes`


def scan(x, dt, a, b, c, d, state, chunk: int = CHUNK, chunks: int = CHUNKS) -> torch.Tensor:
    """Arguments, result and effect as of `nemolab.engine.mamba.scan`; x, b and c may be parts of wider rows."""
    tokens, heads, head_dim = x.shape
    y = torch.empty(tokens, heads, head_dim, device=x.device)
    start = 0
    while start < tokens:
        length = min(chunk, tokens - start)
        count = min(chunks, (tokens - start) // length)
        piece = slice(start, start + count * length)
        _scan_chunks(*(t[piece].unflatten(0, (count, length)) for t in (x, dt, b, c, y)), a, state)
        start = piece.stop
    return y.addcmul_(x, d[:, None])


def _scan_chunks(x, dt, b, c, y, a, state) -> None:
    """Chunks of one length: arguments as of `scan` behind two axes [chunks, length]; y is written, without d x."""
    (count, length, heads, head_dim), (groups, state_size) = x.shape, b.shape[2:]
    decay_sum = (dt * a).double().cumsum(1).transpose(1, 2)  # [chunks, heads, length]
    # Within a chunk: token s reaches token l >= s through exp(sum of log decay between them).
    reach = (decay_sum[..., :, None] - decay_sum[..., None, :]).float().tril_().exp_().tril_()
    to_end = (decay_sum[..., -1:] - decay_sum).float().exp_().transpose(1, 2)[..., None]
    since_start = decay_sum.float().exp_().transpose(1, 2)[..., None]
    scores = c.transpose(1, 2) @ b.permute(0, 2, 3, 1)  # [chunks, groups, length, length]
    reach.unflatten(1, (groups, -1)).mul_(scores[:, :, None])
    weighted = x * dt[..., None]
    y.copy_((reach @ weighted.transpose(1, 2)).transpose(1, 2))
    del reach, scores
    # From before a chunk, and on to the next: a group's heads side by side are the rows of one matrix.
    weighted *= to_end
    now = state.view(groups, -1, state_size)  # [groups, heads of a group * head_dim, state_size]
    for k in range(count):
        seen = c[k].transpose(0, 1) @ now.transpose(1, 2)  # [groups, length, rows]
        y[k].addcmul_(seen.transpose(0, 1).reshape(length, heads, head_dim), since_start[k])
        state.mul_(since_start[k, -1][..., None])
        rows = weighted[k].view(length, groups, -1)
        now.baddbmm_(rows.permute(1, 2, 0), b[k].transpose(0, 1))


def scratch_bytes(heads: int, head_dim: int, tokens: int, chunk: int = CHUNK, chunks: int = CHUNKS) -> int:
    """The most that `scan` holds at once beside arguments and result."""
    tokens = min(tokens, chunk * chunks)
    reach, values = tokens * chunk * heads, tokens * heads * head_dim
    return max(12 * reach, 4 * reach + 16 * values) + 32 * tokens * heads
