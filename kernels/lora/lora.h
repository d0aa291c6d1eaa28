/* Which token has which adapter: built once per step, read by all LoRA ops of the step. */

#ifndef MOTET_LORA_H
#define MOTET_LORA_H

#include <stdint.h>

/* Blocks of tokens that share a slot, as kernels/lora/segments.py lists them. Mirrored by kernels/lora/native.py. */
typedef struct LoraTokens {
    const int32_t *order;       /* tokens, slot by slot */
    const int32_t *block_slot;  /* [num_blocks]; outside of 0 .. num_slots - 1: the block has no adapter */
    const int32_t *block_start; /* [num_blocks]: index into order */
    const int32_t *block_end;
    int64_t num_blocks, block_tokens; /* block_tokens: the most of a block */
    float *h;       /* [modules][num_tokens][width]: what shrink writes and expand reads */
    int64_t width;  /* at least every rank */
} LoraTokens;

#endif
