/* Adapter weights in the arena's pages, as the LoRA ops read them. kernels/lora/layout.py says how they lie.
 *
 * The ops serve modules that read the same rows and write side by side:
 *
 *   shrink:  h[module, t] = x[t] @ A[module, s].T            s the slot of token t
 *   embed:   h[0, t]    = A[s][:, token_ids[t]]
 *   sum:     expanded[module, t] = sum of the passes' sign * scaling * h[module, t], where A and B are summed
 *   expand:  y[t, columns of module] = dora_scale (y - base_bias + scaling (h[module, t] @ B[module, s] + lora_bias))
 *            + base_bias
 *
 * Sums are float32; h is rounded to the dtype, y once at the end. A page is read once for all tokens of a block. A
 * token's sums have one order, whatever block it is in.
 */

#ifndef MOTET_LORA_PAGES_H
#define MOTET_LORA_PAGES_H

#include <stddef.h>

#include "../native/numbers.h"
#include "lora.h"

enum { PAGE_RANKS = 8 };
/* Pages that are fetched ahead: 4 KiB take a core about 100 ns, which is memory's latency. */
enum { AHEAD = 2 };
/* An op is cut into so many tasks per thread where it can be, and no finer: a claim costs as much as a page. */
enum { TASKS_OF_THREAD = 8 };

/* Mirrored by kernels/lora/native.py. */
typedef struct {
    const void *x;             /* [num_tokens, in], rows x_stride apart; of embed int64 token ids */
    void *y;                   /* [num_tokens, sum of out], rows y_stride apart */
    const char *pages;         /* [num_pages, PAGE_RANKS, tile_width] */
    const int32_t *page_ids;
    const int32_t *first;      /* [num_modules, num_slots], and so rank and scaling */
    const int32_t *rank;
    const float *scaling;
    const int64_t *dora_scale; /* [num_modules, num_slots] or NULL: where the module's vector begins; below 0: none */
    const int64_t *lora_bias;
    const float *base_bias;    /* [sum of out] or NULL */
    const int64_t *out;        /* [num_modules] */
    int64_t x_stride, y_stride, in, num_modules, num_slots, tile_width, dtype;
    double shrink_scaling;     /* h is multiplied by it */
    int64_t lora_pass;         /* which of the step's LoraTokens the op is for */
} LoraModules;

/* The pages of one matrix side: groups of 8 ranks, tiles of columns. */
typedef struct {
    const char *pages;
    const int32_t *ids; /* of the first page */
    int64_t num_tiles, page_bytes, row_bytes;
} Matrix;

INLINE const char *page_of(const Matrix *m, int64_t group, int64_t tile) {
    return m->pages + m->ids[group * m->num_tiles + tile] * m->page_bytes;
}

INLINE int64_t tiles_of(const LoraModules *p, int64_t width) { return (width + p->tile_width - 1) / p->tile_width; }

/* A (which 0) or B (which 1) of a module and slot. */
static Matrix matrix_of(const LoraModules *p, int64_t module, int64_t slot, int which) {
    const int64_t at = module * p->num_slots + slot, row_bytes = p->tile_width * item_bytes((int)p->dtype);
    const int64_t a_tiles = tiles_of(p, p->in), groups = (p->rank[at] + PAGE_RANKS - 1) / PAGE_RANKS;
    return (Matrix){
        .pages = p->pages,
        .ids = p->page_ids + p->first[at] + (which ? groups * a_tiles : 0),
        .num_tiles = which ? tiles_of(p, p->out[module]) : a_tiles,
        .page_bytes = PAGE_RANKS * row_bytes,
        .row_bytes = row_bytes,
    };
}

/* Have the cache lines of these bytes on their way. */
INLINE void fetch(const char *from, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += LINE) __builtin_prefetch(from + line);
}

/* The tokens that an op is for; NULL: the step has none for it. */
INLINE const LoraTokens *tokens_of(const LoraModules *p, const Step *step) {
    const LoraTokens *tokens = step->lora;
    for (int64_t pass = p->lora_pass; tokens && pass > 0; pass--) tokens = tokens->next;
    return tokens;
}

/* -1 for a block without an adapter. */
INLINE int64_t slot_of(const LoraModules *p, const LoraTokens *tokens, int64_t block) {
    const int64_t slot = tokens->block_slot[block];
    return slot >= 0 && slot < p->num_slots ? slot : -1;
}

#endif
