/* LoRA over the arena's pages, for sites that read the same rows and write side by side: shrink, embed, expand.
 *
 *   shrink:  h[site, t] = x[t] @ A[site, s].T            s the slot of token t
 *   embed:   h[0, t]    = A[s][:, token_ids[t]]
 *   expand:  y[t, columns of site] = gain (y - base_bias + scaling (h[site, t] @ B[site, s] + lora_bias)) + base_bias
 *
 * How matrices and vectors lie in pages, kernels/lora/layout.py says. Sums are float32; h is rounded to the dtype, y once
 * at the end. A page is read once for all tokens of a block. A token's sums have one order, whatever block it is in.
 */

#include "lora.h"

#include <stddef.h>

#include "../native/numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { PAGE_RANKS = 8, TILE_ROWS = LANES == 16 ? 3 : 1, RANKS_AT_ONCE = LANES == 16 ? 8 : 4, CHUNK = 512 };

/* Mirrored by kernels/lora/native.py. */
typedef struct {
    const void *x;             /* [num_tokens, in], rows x_stride apart; of embed int64 token ids */
    void *y;                   /* [num_tokens, sum of out], rows y_stride apart */
    const char *pages;         /* [num_pages, PAGE_RANKS, tile_width] */
    const int32_t *page_ids;
    const int32_t *first;      /* [num_sites, num_slots], and so rank and scaling */
    const int32_t *rank;
    const float *scaling;
    const int64_t *gain;       /* [num_sites, num_slots] or NULL: where the site's vector begins, below 0: it has none */
    const int64_t *lora_bias;
    const float *base_bias;    /* [sum of out] or NULL */
    const int64_t *out;        /* [num_sites] */
    int64_t x_stride, y_stride, in, num_sites, num_slots, tile_width, dtype;
    double shrink_scaling;     /* h is multiplied by it */
} LoraSites;

typedef float eight __attribute__((vector_size(32)));
typedef uint32_t eight_bits __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUFFLE8(a, b, i, j, k, l, m, n, o, p) __builtin_shufflevector(a, b, i, j, k, l, m, n, o, p)
#else
#define SHUFFLE8(a, b, i, j, k, l, m, n, o, p) __builtin_shuffle(a, b, (eight_bits){i, j, k, l, m, n, o, p})
#endif

/* The sums over the lanes of eight vectors. */
INLINE eight sums_of(const vec *values) {
    eight part[8];
    for (int idx = 0; idx < 8; idx++) {
        eight halves[LANES / 8];
        memcpy(halves, values + idx, sizeof halves);
        part[idx] = LANES == 16 ? halves[0] + halves[LANES / 8 - 1] : halves[0];
    }
    for (int idx = 0; idx < 4; idx++) /* neighbouring lanes of two vectors */
        part[idx] = SHUFFLE8(part[2 * idx], part[2 * idx + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
                    SHUFFLE8(part[2 * idx], part[2 * idx + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int idx = 0; idx < 2; idx++)
        part[idx] = SHUFFLE8(part[2 * idx], part[2 * idx + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                    SHUFFLE8(part[2 * idx], part[2 * idx + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE8(part[0], part[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE8(part[0], part[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE float rounded_to(float value, int dtype) {
    char code[4];
    store_one(code, 0, dtype, value);
    return load_one(code, 0, dtype);
}

/* The pages of one matrix side: groups of 8 ranks, tiles of columns. */
typedef struct {
    const char *pages;
    const int32_t *ids; /* of the first page */
    int64_t num_tiles, page_bytes, row_bytes;
} Matrix;

INLINE const char *page_of(const Matrix *m, int64_t group, int64_t tile) {
    return m->pages + m->ids[group * m->num_tiles + tile] * m->page_bytes;
}

INLINE int64_t tiles_of(const LoraSites *p, int64_t width) { return (width + p->tile_width - 1) / p->tile_width; }

/* A (which 0) or B (which 1) of a site and slot. */
static Matrix matrix_of(const LoraSites *p, int64_t site, int64_t slot, int which) {
    const int64_t at = site * p->num_slots + slot, row_bytes = p->tile_width * item_bytes((int)p->dtype);
    const int64_t a_tiles = tiles_of(p, p->in), groups = (p->rank[at] + PAGE_RANKS - 1) / PAGE_RANKS;
    return (Matrix){
        .pages = p->pages,
        .ids = p->page_ids + p->first[at] + (which ? groups * a_tiles : 0),
        .num_tiles = which ? tiles_of(p, p->out[site]) : a_tiles,
        .page_bytes = PAGE_RANKS * row_bytes,
        .row_bytes = row_bytes,
    };
}

INLINE int64_t slot_of(const LoraSites *p, const LoraTokens *tokens, int64_t block) {
    const int64_t slot = tokens->block_slot[block];
    return slot >= 0 && slot < p->num_slots ? slot : -1;
}

/* sums[row][rank] += x[row] . page[rank] over `count` columns. */
INLINE void dot_page(const char *const *x, int64_t begin, int64_t count, const char *page, int64_t row_bytes,
                     const char *next, vec sums[TILE_ROWS][PAGE_RANKS], int rows, int dtype) {
    const int64_t item = item_bytes(dtype);
    int64_t place = 0;
    for (; place + PAIR <= count; place += PAIR) {
        if (next)
            for (int rank = 0; rank < PAGE_RANKS; rank++)
                for (int64_t line = 0; line < PAIR * item; line += LINE)
                    __builtin_prefetch(next + rank * row_bytes + place * item + line);
#ifdef __AVX512BF16__
        if (dtype == BFLOAT16) {
            __m512bh both[TILE_ROWS];
            for (int row = 0; row < rows; row++) both[row] = (__m512bh)_mm512_loadu_si512(x[row] + (begin + place) * item);
            _Pragma("GCC unroll 8") for (int rank = 0; rank < PAGE_RANKS; rank++) {
                const __m512bh weights = (__m512bh)_mm512_loadu_si512(page + rank * row_bytes + place * item);
                for (int row = 0; row < rows; row++)
                    sums[row][rank] = (vec)_mm512_dpbf16_ps((__m512)sums[row][rank], both[row], weights);
            }
            continue;
        }
#endif
        vec first[TILE_ROWS], second[TILE_ROWS];
        for (int row = 0; row < rows; row++) load_pair(x[row], begin + place, dtype, &first[row], &second[row]);
        _Pragma("GCC unroll 8") for (int rank = 0; rank < PAGE_RANKS; rank++) {
            vec one, other;
            load_pair(page + rank * row_bytes, place, dtype, &one, &other);
            for (int row = 0; row < rows; row++) {
                sums[row][rank] += first[row] * one;
                sums[row][rank] += second[row] * other;
            }
        }
    }
    if (place < count)
        for (int row = 0; row < rows; row++) {
            vec first, second;
            load_part(x[row], begin + place, count - place, dtype, &first, &second);
            for (int rank = 0; rank < PAGE_RANKS; rank++) {
                vec one, other;
                load_part(page + rank * row_bytes, place, count - place, dtype, &one, &other);
                sums[row][rank] += first * one;
                sums[row][rank] += second * other;
            }
        }
}

INLINE void shrink_rows(const LoraSites *p, const Matrix *a, const char *const *x, float *const *h, int64_t rank,
                        int is_first, int rows, int dtype) {
    for (int64_t group = 0; group * PAGE_RANKS < rank; group++) {
        vec sums[TILE_ROWS][PAGE_RANKS];
        for (int row = 0; row < rows; row++)
            for (int idx = 0; idx < PAGE_RANKS; idx++) sums[row][idx] = (vec){0};
        const int is_last = (group + 1) * PAGE_RANKS >= rank;
        for (int64_t tile = 0; tile < a->num_tiles; tile++) {
            const int64_t begin = tile * p->tile_width, left = p->in - begin;
            const char *next = NULL;
            if (is_first && tile + 1 < a->num_tiles) next = page_of(a, group, tile + 1);
            if (is_first && tile + 1 == a->num_tiles && !is_last) next = page_of(a, group + 1, 0);
            dot_page(x, begin, left < p->tile_width ? left : p->tile_width, page_of(a, group, tile), a->row_bytes, next,
                     sums, rows, dtype);
        }
        const int64_t count = is_last ? rank - group * PAGE_RANKS : PAGE_RANKS;
        for (int row = 0; row < rows; row++) {
            const eight total = sums_of(sums[row]);
            for (int64_t idx = 0; idx < count; idx++)
                h[row][group * PAGE_RANKS + idx] = rounded_to(total[idx] * (float)p->shrink_scaling, dtype);
        }
    }
}

INLINE void shrink_block(const LoraSites *p, const Step *step, int64_t block, int64_t site, int dtype) {
    const LoraTokens *tokens = step->lora;
    const int64_t slot = slot_of(p, tokens, block);
    if (slot < 0) return;
    const int64_t rank = p->rank[site * p->num_slots + slot];
    if (rank == 0) return;
    const Matrix a = matrix_of(p, site, slot, 0);
    const int64_t begin = tokens->block_start[block], end = tokens->block_end[block];
    for (int64_t at = begin; at < end;) {
        const char *x[TILE_ROWS];
        float *h[TILE_ROWS];
        const int64_t left = end - at, rows = left < TILE_ROWS ? left : TILE_ROWS;
        for (int64_t row = 0; row < rows; row++) {
            const int64_t token = tokens->order[at + row];
            x[row] = (const char *)p->x + token * p->x_stride * item_bytes(dtype);
            h[row] = tokens->h + (site * step->num_tokens + token) * tokens->width;
        }
        if (rows == 1) shrink_rows(p, &a, x, h, rank, at == begin, 1, dtype);
#if defined(__AVX512F__)
        if (rows == 2) shrink_rows(p, &a, x, h, rank, at == begin, 2, dtype);
        if (rows == 3) shrink_rows(p, &a, x, h, rank, at == begin, 3, dtype);
#endif
        at += rows;
    }
}

static int64_t num_shrink_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return step->lora ? step->lora->num_blocks * ((const LoraSites *)problem)->num_sites : 0;
}

static void shrink(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const LoraSites *p = problem;
    const int64_t block = task / p->num_sites, site = task % p->num_sites;
    if (p->dtype == BFLOAT16)
        shrink_block(p, step, block, site, BFLOAT16);
    else if (p->dtype == FLOAT16)
        shrink_block(p, step, block, site, FLOAT16);
    else
        shrink_block(p, step, block, site, FLOAT32);
}

static int64_t num_embed_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)problem, (void)num_threads;
    return step->lora ? step->lora->num_blocks : 0;
}

/* An id that A has no column of gives NaN. */
static void embed(const void *problem, const Step *step, int64_t block, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const LoraSites *p = problem;
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

/* ---- expand ---- */

/* One task: some columns of one site for one block of tokens. */
typedef struct {
    int64_t slot, site, column, count; /* columns of the site */
    int64_t tile, offset;              /* where they lie in B */
    int64_t place;                     /* of the first one in y */
} Part;

static int64_t chunks_of_tile(const LoraSites *p) { return (p->tile_width + CHUNK - 1) / CHUNK; }

static int64_t chunks_of_block(const LoraSites *p) {
    int64_t tiles = 0;
    for (int64_t site = 0; site < p->num_sites; site++) tiles += tiles_of(p, p->out[site]);
    return tiles * chunks_of_tile(p);
}

static Part part_of(const LoraSites *p, int64_t slot, int64_t index) {
    Part part = {.slot = slot};
    const int64_t per_tile = chunks_of_tile(p);
    for (;; part.site++) {
        const int64_t chunks = tiles_of(p, p->out[part.site]) * per_tile;
        if (index < chunks) break;
        index -= chunks;
        part.place += p->out[part.site];
    }
    part.tile = index / per_tile;
    part.offset = index % per_tile * CHUNK;
    part.column = part.tile * p->tile_width + part.offset;
    const int64_t in_tile = p->tile_width - part.offset, in_site = p->out[part.site] - part.column;
    part.count = in_tile < CHUNK ? in_tile : CHUNK;
    if (in_site < part.count) part.count = in_site;
    part.place += part.column;
    return part;
}

INLINE void load_any(const void *row, int64_t place, int64_t count, int dtype, vec *first, vec *second) {
    if (count >= PAIR)
        load_pair(row, place, dtype, first, second);
    else
        load_part(row, place, count, dtype, first, second);
}

/* sums[row][columns in order of pairs] += h[row][ranks] @ `ranks` rows of a page. */
INLINE void mix_page(const char *page, int64_t row_bytes, int64_t offset, int64_t count, const float *const *h,
                     float *sums, int64_t rows, int ranks, int dtype) {
    for (int64_t place = 0; place < count; place += PAIR) {
        vec first[RANKS_AT_ONCE], second[RANKS_AT_ONCE];
        _Pragma("GCC unroll 8") for (int rank = 0; rank < ranks; rank++)
            load_any(page + rank * row_bytes, offset + place, count - place, dtype, &first[rank], &second[rank]);
        for (int64_t row = 0; row < rows; row++) {
            float *at = sums + row * CHUNK + place;
            vec one = load(at), other = load(at + LANES);
            _Pragma("GCC unroll 8") for (int rank = 0; rank < ranks; rank++) {
                one += h[row][rank] * first[rank];
                other += h[row][rank] * second[rank];
            }
            store(at, one);
            store(at + LANES, other);
        }
    }
}

/* `count` values of a vector from index `at` on, one by one over the pages. */
static void read_vector(const LoraSites *p, int64_t at, int64_t count, float *values) {
    const int64_t page_bytes = PAGE_RANKS * p->tile_width * item_bytes((int)p->dtype), per_page = page_bytes / 4;
    while (count > 0) {
        const int64_t offset = at % per_page, here = per_page - offset < count ? per_page - offset : count;
        const char *page = p->pages + p->page_ids[at / per_page] * page_bytes;
        memcpy(values, page + 4 * offset, (size_t)here * 4);
        values += here, at += here, count -= here;
    }
}

/* In a pair's order. */
INLINE void load_floats(const float *from, int64_t count, int dtype, vec *first, vec *second) {
    float both[PAIR] = {0};
    for (int64_t idx = 0; idx < PAIR && idx < count; idx++)
        both[dtype == BFLOAT16 ? idx % 2 * LANES + idx / 2 : idx] = from[idx];
    *first = load(both);
    *second = load(both + LANES);
}

INLINE void finish_rows(const LoraSites *p, const LoraTokens *tokens, int64_t begin, int64_t rows, const Part *part,
                        const float *sums, const float *gain, const float *lora_bias, int dtype) {
    const int64_t item = item_bytes(dtype);
    const float scaling = p->scaling[part->site * p->num_slots + part->slot];
    const float *own = p->base_bias && gain ? p->base_bias + part->place : NULL;
    for (int64_t row = 0; row < rows; row++) {
        char *y = (char *)p->y + tokens->order[begin + row] * p->y_stride * item;
        for (int64_t place = 0; place < part->count; place += PAIR) {
            const int64_t left = part->count - place;
            vec first = load(sums + row * CHUNK + place), second = load(sums + row * CHUNK + place + LANES), one, other;
            if (lora_bias) {
                load_floats(lora_bias + place, left, dtype, &one, &other);
                first += one, second += other;
            }
            first *= scaling, second *= scaling;
            load_any(y, part->place + place, left, dtype, &one, &other);
            first += one, second += other;
            if (gain) {
                vec bias_first = {0}, bias_second = {0};
                if (own) load_floats(own + place, left, dtype, &bias_first, &bias_second);
                load_floats(gain + place, left, dtype, &one, &other);
                first = one * (first - bias_first) + bias_first;
                second = other * (second - bias_second) + bias_second;
            }
            if (left >= PAIR)
                store_pair(y, part->place + place, dtype, first, second);
            else
                store_part(y, part->place + place, left, dtype, first, second);
        }
    }
}

INLINE void expand_part(const LoraSites *p, const Step *step, int64_t block, int64_t index, float *scratch, int dtype) {
    const LoraTokens *tokens = step->lora;
    const int64_t slot = slot_of(p, tokens, block);
    if (slot < 0) return;
    const Part part = part_of(p, slot, index);
    const int64_t at = part.site * p->num_slots + slot, rank = p->rank[at];
    if (rank == 0) return;
    const int64_t begin = tokens->block_start[block], rows = tokens->block_end[block] - begin;
    const Matrix b = matrix_of(p, part.site, slot, 1);
    float *sums = scratch, *gain = scratch + tokens->block_tokens * CHUNK, *lora_bias = gain + CHUNK;
    const float **h = (const float **)(lora_bias + CHUNK);
    memset(sums, 0, (size_t)(rows * CHUNK) * sizeof *sums);
    for (int64_t first = 0; first < rank; first += RANKS_AT_ONCE) {
        const int64_t group = first / PAGE_RANKS, in_page = first % PAGE_RANKS, left = rank - first;
        const char *page = page_of(&b, group, part.tile) + in_page * b.row_bytes;
        if (in_page == 0 && (group + 1) * PAGE_RANKS < rank) {
            const char *next = page_of(&b, group + 1, part.tile) + part.offset * item_bytes(dtype);
            for (int64_t row = 0; row < PAGE_RANKS; row++)
                for (int64_t line = 0; line < part.count * item_bytes(dtype); line += LINE)
                    __builtin_prefetch(next + row * b.row_bytes + line);
        }
        for (int64_t row = 0; row < rows; row++)
            h[row] = tokens->h + (part.site * step->num_tokens + tokens->order[begin + row]) * tokens->width + first;
        if (left >= RANKS_AT_ONCE)
            mix_page(page, b.row_bytes, part.offset, part.count, h, sums, rows, RANKS_AT_ONCE, dtype);
        else
            for (int64_t idx = 0; idx < left; idx++) {
                mix_page(page + idx * b.row_bytes, b.row_bytes, part.offset, part.count, h, sums, rows, 1, dtype);
                for (int64_t row = 0; row < rows; row++) h[row]++;
            }
    }
    const int has_gain = p->gain && p->gain[at] >= 0, has_bias = p->lora_bias && p->lora_bias[at] >= 0;
    if (has_gain) read_vector(p, p->gain[at] + part.column, part.count, gain);
    if (has_bias) read_vector(p, p->lora_bias[at] + part.column, part.count, lora_bias);
    finish_rows(p, tokens, begin, rows, &part, sums, has_gain ? gain : NULL, has_bias ? lora_bias : NULL, dtype);
}

static int64_t num_expand_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return step->lora ? step->lora->num_blocks * chunks_of_block(problem) : 0;
}

static void expand(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads;
    const LoraSites *p = problem;
    const int64_t chunks = chunks_of_block(p), block = task / chunks, index = task % chunks;
    if (p->dtype == BFLOAT16)
        expand_part(p, step, block, index, scratch, BFLOAT16);
    else if (p->dtype == FLOAT16)
        expand_part(p, step, block, index, scratch, FLOAT16);
    else
        expand_part(p, step, block, index, scratch, FLOAT32);
}

static int64_t expand_scratch(const void *problem, const Step *step) {
    (void)problem;
    if (!step->lora) return 0;
    return (step->lora->block_tokens + 2) * CHUNK * (int64_t)sizeof(float) +
           step->lora->block_tokens * (int64_t)sizeof(float *);
}

const OpKind lora_shrink_op = {"lora_shrink", num_shrink_tasks, shrink, NULL};
const OpKind lora_embed_op = {"lora_embed", num_embed_tasks, embed, NULL};
const OpKind lora_expand_op = {"lora_expand", num_expand_tasks, expand, expand_scratch};
