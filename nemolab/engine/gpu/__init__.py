"""The engine on a CUDA card: how experts reach the arithmetic. Importing this imports neither torch nor triton.

    side, model         what an engine opens, and the model it gets
    device, operators   a card or the CPU in its place; kernels or their twins
    plan, guard, beside what is taken of the card's memory: planned, kept to, measured
    weights, state, layers, attention, moe   the layers; a token's and a prompt's way through each

One token:

    decoder             from stretch to stretch, and what the CPU does in between
    stretches           a stretch as a CUDA graph
    moe_step            routed experts by one of four strategies; kept: with slots that keep what was copied, a trial
    token_parts         what MoE layers share: guesses, forced choices, what is recorded
    table, cache_memory where experts lie: as the card is told, and as the CPU finds it
    pinned              small memory that both sides see

Prompts:

    prompt_experts      routed experts in batches through a ring
"""
