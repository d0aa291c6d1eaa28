/* lora_shrink: x @ A, lora_sum: sums of it, and lora_embed: columns of A by token id (pages.h). */

#include "../native/sums.h"
#include "pages.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* TILE_ROWS: rows of x whose products with 8 ranks stay in registers. */
enum { TILE_ROWS = LANES == 16 ? 3 : 1 };

INLINE float rounded_to(float value, int dtype) {
    char code[4];
    store_one(code, 0, dtype, value);
    return load_one(code, 0, dtype);
}

/* Unrolled, so that sums[row][rank] are registers from the first page to the last. */
#define EACH_ROW _Pragma("GCC unroll 3") for (int row = 0; row < rows; row++)
#define EACH_RANK _Pragma("GCC unroll 8") for (int rank = 0; rank < PAGE_RANKS; rank++)

/* sums[row][rank] += x[row] . page[rank] over `count` columns. Meanwhile the page `next` is fetched, if any. */
INLINE void dot_page(const char *const *x, int64_t begin, int64_t count, const char *page, int64_t row_bytes,
                     const char *next, vec sums[TILE_ROWS][PAGE_RANKS], int rows, int dtype) {
    const int64_t item = item_bytes(dtype);
    int64_t place = 0;
    for (; place + PAIR <= count; place += PAIR) {
        if (next) {
            fetch(next, PAGE_RANKS * PAIR * item);
            next += PAGE_RANKS * PAIR * item;
        }
#ifdef __AVX512BF16__
        if (dtype == BFLOAT16) {
            __m512bh both[TILE_ROWS];
            EACH_ROW
                both[row] = (__m512bh)_mm512_loadu_si512(x[row] + (begin + place) * item);
            EACH_RANK {
                const __m512bh weights = (__m512bh)_mm512_loadu_si512(page + rank * row_bytes + place * item);
                EACH_ROW
                    sums[row][rank] = (vec)_mm512_dpbf16_ps((__m512)sums[row][rank], both[row], weights);
            }
            continue;
        }
#endif
        if (dtype == FLOAT32) { /* half a pair at a time, which takes fewer registers */
            for (int half = 0; half < 2; half++) {
                const int64_t column = place + half * LANES;
                vec some[TILE_ROWS];
                EACH_ROW some[row] = load((const float *)x[row] + begin + column);
                EACH_RANK {
                    const vec weights = in_register(load((const float *)(page + rank * row_bytes) + column));
                    EACH_ROW sums[row][rank] += some[row] * weights;
                }
            }
            continue;
        }
        vec first[TILE_ROWS], second[TILE_ROWS];
        EACH_ROW load_pair(x[row], begin + place, dtype, &first[row], &second[row]);
        EACH_RANK {
            vec one, other;
            load_pair(page + rank * row_bytes, place, dtype, &one, &other);
            EACH_ROW {
                sums[row][rank] += first[row] * one;
                sums[row][rank] += second[row] * other;
            }
        }
    }
    if (place < count)
        EACH_ROW {
            vec first, second;
            load_part(x[row], begin + place, count - place, dtype, &first, &second);
            EACH_RANK {
                vec one, other;
                load_part(page + rank * row_bytes, place, count - place, dtype, &one, &other);
                sums[row][rank] += first * one;
                sums[row][rank] += second * other;
            }
        }
}

/* h[row] = x[row] @ the 8 ranks of a group. Pages from `fetched` on are not fetched ahead. */
INLINE void shrink_rows(const LoraModules *p, const Matrix *a, const char *const *x, float *const *h, int64_t group,
                        int64_t num_ranks, int64_t fetched, int rows, int dtype) {
    vec sums[TILE_ROWS][PAGE_RANKS];
    EACH_ROW EACH_RANK sums[row][rank] = (vec){0};
    for (int64_t tile = 0; tile < a->num_tiles; tile++) {
        const int64_t begin = tile * p->tile_width, left = p->in - begin, index = group * a->num_tiles + tile + AHEAD;
        const char *next = index < fetched ? a->pages + a->ids[index] * a->page_bytes : NULL;
        const int64_t count = left < p->tile_width ? left : p->tile_width;
        dot_page(x, begin, count, page_of(a, group, tile), a->row_bytes, next, sums, rows, dtype);
    }
    const int64_t left = num_ranks - group * PAGE_RANKS, count = left < PAGE_RANKS ? left : PAGE_RANKS;
    EACH_ROW {
        const eight total = sums_of_eight(sums[row]);
        for (int64_t idx = 0; idx < count; idx++)
            h[row][group * PAGE_RANKS + idx] = rounded_to(total[idx] * (float)p->shrink_scaling, dtype);
    }
}

/* The groups begin to end of ranks of one module for one block of tokens. */
INLINE void shrink_groups(const LoraModules *p, const Step *step, int64_t block, int64_t module, int64_t slot,
                          int64_t begin, int64_t end, int dtype) {
    const LoraTokens *tokens = tokens_of(p, step);
    const int64_t rank = p->rank[module * p->num_slots + slot];
    const Matrix a = matrix_of(p, module, slot, 0);
    const int64_t first = tokens->block_start[block], last = tokens->block_end[block];
    for (int64_t group = begin; group < end; group++)
        for (int64_t at = first; at < last;) {
            const char *x[TILE_ROWS];
            float *h[TILE_ROWS];
            const int64_t left = last - at, rows = left < TILE_ROWS ? left : TILE_ROWS;
            const int64_t fetched = at == first ? end * a.num_tiles : 0;
            for (int64_t row = 0; row < rows; row++) {
                const int64_t token = tokens->order[at + row];
                x[row] = (const char *)p->x + token * p->x_stride * item_bytes(dtype);
                h[row] = tokens->h + (module * step->num_tokens + token) * tokens->width;
            }
            if (rows == 1) shrink_rows(p, &a, x, h, group, rank, fetched, 1, dtype);
#if defined(__AVX512F__)
            if (rows == 2) shrink_rows(p, &a, x, h, group, rank, fetched, 2, dtype);
            if (rows == 3) shrink_rows(p, &a, x, h, group, rank, fetched, 3, dtype);
#endif
            at += rows;
        }
}

/* Tasks of one block and module: all its ranks, or one group of 8 each where there are few blocks. */
static int64_t rank_parts(const LoraModules *p, const LoraTokens *tokens, int64_t num_threads) {
    if (tokens->num_blocks * p->num_modules >= TASKS_OF_THREAD * num_threads) return 1;
    return (tokens->width + PAGE_RANKS - 1) / PAGE_RANKS;
}

static int64_t num_shrink_tasks(const void *problem, const Step *step, int64_t num_threads) {
    const LoraModules *p = problem;
    const LoraTokens *tokens = tokens_of(p, step);
    return tokens ? tokens->num_blocks * p->num_modules * rank_parts(p, tokens, num_threads) : 0;
}

static void shrink(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)scratch;
    const LoraModules *p = problem;
    const LoraTokens *tokens = tokens_of(p, step);
    const int64_t parts = rank_parts(p, tokens, num_threads), part = task % parts;
    const int64_t module = task / parts % p->num_modules;
    const int64_t block = task / parts / p->num_modules, slot = slot_of(p, tokens, block);
    if (slot < 0) return;
    const int64_t groups = (p->rank[module * p->num_slots + slot] + PAGE_RANKS - 1) / PAGE_RANKS;
    const int64_t begin = parts == 1 ? 0 : part, end = parts == 1 || groups < part + 1 ? groups : part + 1;
    if (begin >= end) return;
    if (p->dtype == BFLOAT16)
        shrink_groups(p, step, block, module, slot, begin, end, BFLOAT16);
    else if (p->dtype == FLOAT16)
        shrink_groups(p, step, block, module, slot, begin, end, FLOAT16);
    else
        shrink_groups(p, step, block, module, slot, begin, end, FLOAT32);
}

static int64_t num_embed_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)problem, (void)num_threads;
    return step->lora ? step->lora->num_blocks : 0;
}

/* An id that A has no column of gives NaN. */
static void embed(const void *problem, const Step *step, int64_t block, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const LoraModules *p = problem;
    const LoraTokens *tokens = step->lora;
    const int64_t slot = slot_of(p, tokens, block);
    if (slot < 0) return;
    const Matrix a = matrix_of(p, 0, slot, 0);
    for (int64_t at = tokens->block_start[block]; at < tokens->block_end[block]; at++) {
        const int64_t token = tokens->order[at], column = ((const int64_t *)p->x)[token];
        float *h = tokens->h + token * tokens->width;
        const int is_known = column >= 0 && column < p->in;
        for (int64_t rank = 0; rank < p->rank[slot]; rank++) {
            float value = __builtin_nanf("");
            if (is_known) {
                const char *page = page_of(&a, rank / PAGE_RANKS, column / p->tile_width);
                value = load_one(page + rank % PAGE_RANKS * a.row_bytes, column % p->tile_width, (int)p->dtype);
            }
            h[rank] = rounded_to(value * (float)p->shrink_scaling, (int)p->dtype);
        }
    }
}

static int64_t num_sum_tasks(const void *problem, const Step *step, int64_t num_threads) {
    const LoraModules *p = problem;
    (void)num_threads;
    for (const LoraTokens *tokens = step->lora; tokens; tokens = tokens->next)
        if (tokens->sign_of_column) return p->num_modules;
    return 0;
}

static float *summed_row(const LoraTokens *tokens, int64_t row) { return (float *)tokens->expanded + row * tokens->width; }

/* One module, for the tokens whose adapters' A and B are summed. A has no scaling of its own, B is multiplied by the
 * root that the table has: A gets the same root, with the scale's sign. */
static void sum(const void *problem, const Step *step, int64_t module, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const LoraModules *p = problem;
    const int64_t first_row = module * step->num_tokens;
    for (int adds = 0; adds < 2; adds++) /* zeros, then the sums in the order of the adapters */
        for (const LoraTokens *tokens = step->lora; tokens; tokens = tokens->next)
            for (int64_t block = 0; tokens->sign_of_column && block < tokens->num_blocks; block++) {
                const int64_t slot = slot_of(p, tokens, block);
                if (slot < 0) continue;
                const int64_t at = module * p->num_slots + slot, rank = p->rank[at];
                const float own = p->scaling[module * p->num_slots + tokens->slot_of_column[slot]];
                const float sign = own < 0 ? -tokens->sign_of_column[slot] : tokens->sign_of_column[slot];
                const float factor = p->scaling[at] * sign;
                for (int64_t idx = tokens->block_start[block]; idx < tokens->block_end[block]; idx++) {
                    const int64_t row = first_row + tokens->order[idx];
                    const float *h = tokens->h + row * tokens->width;
                    float *to = summed_row(tokens, row);
                    if (!adds) memset(to, 0, (size_t)tokens->width * sizeof *to);
                    for (int64_t col = 0; adds && col < rank; col++) to[col] += factor * h[col];
                }
            }
}

const OpKind lora_shrink_op = {"lora_shrink", num_shrink_tasks, shrink, NULL};
const OpKind lora_sum_op = {"lora_sum", num_sum_tasks, sum, NULL};
const OpKind lora_embed_op = {"lora_embed", num_embed_tasks, embed, NULL};
