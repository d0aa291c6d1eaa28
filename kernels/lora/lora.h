/* Which token has which adapter: built once per step, read by all LoRA ops of the step. */

#ifndef MOTET_LORA_H
#define MOTET_LORA_H

#include <stdint.h>

/* Blocks of tokens that share a slot, as kernels/lora/segments.py lists them. Mirrored by kernels/lora/native.py.
 *
 * A step has a list of them: the tokens by their first adapter, then by their second and so on, each with an h of its
 * own. Where the adapters' A and B are summed, `expanded` is one sum over all of these: what lora_sum writes.
 */
typedef struct LoraTokens {
    const int32_t *order;       /* tokens, slot by slot */
    const int32_t *block_slot;  /* [num_blocks]; outside of 0 .. num_slots - 1: the block has no adapter */
    const int32_t *block_start; /* [num_blocks]: index into order */
    const int32_t *block_end;
    int64_t num_blocks, block_tokens; /* block_tokens: the most of a block */
    float *h;             /* [modules][num_tokens][width]: what shrink writes */
    const float *expanded; /* the same shape: what expand reads; h itself where products are summed */
    int64_t width;        /* at least every rank */
    const struct LoraTokens *next;  /* the tokens by a further adapter; NULL: there are none */
    const int32_t *slot_of_column;  /* where A and B are summed: the slot whose adapter a slot of these blocks scales */
    const float *sign_of_column;    /* likewise the scale's sign; NULL where products are summed */
} LoraTokens;

#endif
