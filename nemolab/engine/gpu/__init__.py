"""The engine on a CUDA card: how experts reach the arithmetic. Importing this imports neither torch nor triton.

    side, model         what an engine opens, and the model it gets
    device, operators   a card or the CPU in its place; kernels or their twins
    plan, guard, non_torch  what is taken of the card's memory: planned, kept to, measured
    allocator           torch's, which gives nothing back while a graph is captured
    weights, state, layers, attention, moe   the layers; a token's and a prompt's way through each

One token:

    decoder             from segment to segment, and what the CPU does in between
    segments            a segment as a CUDA graph
    moe_step            routed experts by one of four strategies; kept: with slots that keep what was copied, a trial
    token_parts         what MoE layers share: guesses, forced choices, what is recorded
    table, cache_memory where experts lie: as the card is told, and in memory that is page-locked for it
    expert_fetch        where those that a layer chose are, or will be
    pinned              small memory that both sides see

Prompts:

    prompt_experts      routed experts in batches through a ring

Who may write what, and what must be known before. Everything is queued on torch's current stream, the main one, but for
copies of experts, which have a stream of their own, and a branch inside of a graph, which ends inside:

    a slot or half of a ring on the card   by a copy, behind the event that the kernels that read it last have ended
                                           (`_done`); those kernels wait for the event of its copies (`_copied`)
    a slot that keeps what was copied      likewise, and never one that the layer being computed uses: a layer's
                                           kernels are done once the choice of the next one is known
    a row of the cache in RAM              by the reader: in decode, once the choice of a layer behind the one that used
                                           it is known; for prompts, once the copies that read it are done; where a copy
                                           on a guess may be reading it, once that is done (`KeepingStep.let_go`)
    the table on the card                  by a launch on the main stream, before a segment: zero before a row is
                                           written to, its address once the row is whole
    page-locked memory for the card        by the CPU, once the last token's logits, or a later choice, have come
    page-locked memory for the CPU         by the card; the CPU resets a layer's choice before the segment is queued
    the graphs and the state they touch    no graph is replayed once a tensor it touches was replaced
"""
