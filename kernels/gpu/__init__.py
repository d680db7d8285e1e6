"""The same operators as Triton kernels for CUDA cards, sm_80 and up. Importing this imports neither torch nor triton.

    decode            what a stored byte means, by bit placing: shared by the kernels, never launched itself
    expert_step       routed experts of a token, read where they lie: up, ReLU^2, down
    combine           the weighted sum over ranks, in a fixed order
    stream            reads memory and adds it up: the floor under the kernels

Kernels take addresses of blocks as integers from tables on the card, so that a block in page-locked memory and one in a
slot on the card go through the same compiled code: that is what makes the strategies agree to the bit.
"""
