"""Operators, one a file: contract and traffic, a plain `_torch` twin, the kernel, its launcher. No policy, no I/O.

One token, straight from stored bytes (compiled by numba, vectorised by `simd`, shared out by `team`):

    matvec            a stored matrix times a vector, any format
    expert_step       all routed experts of a token from their blocks
    router_step       the choice of experts
    mamba_step        convolution, state update and gated norm
    attention_step    one query over all keys
    rms_norm          the norm before every layer

Prompts:

    expert_prompt     routed experts on all their tokens
    decode_nvfp4      a matrix to float32, for torch to multiply

`nemolab.jit` says how they are compiled, `warm_up` compiles them all, `read_memory` measures the floor under them.
"""
