"""The same operators as Triton kernels for CUDA cards, sm_80 and up. Importing this imports neither torch nor triton.

One token:

    matvec            a stored matrix times a vector, any format
    expert_step       routed experts, read where they lie: up, ReLU^2, down
    combine           their weighted sum, in a fixed order
    router_step       the choice of experts
    mamba_step        convolution, state update and gated norm
    attention_step    one query over all keys
    rms_norm          the norm before every layer

Prompts:

    linear_prompt     a stored matrix times many tokens
    expert_prompt     routed experts on all their tokens
    mamba_prompt      convolution, scan and gated norm over many tokens
    add_experts       their weighted sum for each token, in a fixed order
    decode_bf16       a matrix to bfloat16, for torch to multiply

`decode` and `codes` say what stored bits are worth, `launch` starts compiled kernels without Triton's own launcher,
`stream` measures what can be read in place.

Blocks are given as integers: addresses from tables on the card, so that one in page-locked memory of the host and one
in a slot on the card go through the same compiled code. That is what makes the transfer strategies agree to the bit.
"""
