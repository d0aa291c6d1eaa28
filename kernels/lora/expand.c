/* lora_expand: y += h @ B, with what DoRA and LoRA biases need, over the arena's pages (pages.h). */

#include "pages.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

/* MIX_ROWS: rows of y whose sums stay in registers, of MOST_PAIRS pairs of columns or MOST_SUMS pairs in all. */
enum { MIX_ROWS = LANES == 16 ? 12 : 4, MOST_PAIRS = LANES == 16 ? 8 : 4, MOST_SUMS = 12 };
/* Columns of a chunk, and the chunks of a task at most. */
enum { CHUNK = 256, MOST_CHUNKS = 4 };

/* Up to CHUNK columns of one tile of one module, for one block of tokens. */
typedef struct {
    int64_t module, column, count; /* columns of the module */
    int64_t tile, offset;        /* where they lie in B */
    int64_t place;               /* of the first one in y */
} Part;

static int64_t chunks_of_tile(const LoraModules *p) { return (p->tile_width + CHUNK - 1) / CHUNK; }

static int64_t chunks_of_block(const LoraModules *p) {
    int64_t tiles = 0;
    for (int64_t module = 0; module < p->num_modules; module++) tiles += tiles_of(p, p->out[module]);
    return tiles * chunks_of_tile(p);
}

/* A part may be empty: of the last tile of a module only the first columns are used. */
static Part part_of(const LoraModules *p, int64_t index) {
    Part part = {0};
    const int64_t per_tile = chunks_of_tile(p);
    for (;; part.module++) {
        const int64_t chunks = tiles_of(p, p->out[part.module]) * per_tile;
        if (index < chunks) break;
        index -= chunks;
        part.place += p->out[part.module];
    }
    part.tile = index / per_tile;
    part.offset = index % per_tile * CHUNK;
    part.column = part.tile * p->tile_width + part.offset;
    const int64_t in_tile = p->tile_width - part.offset, in_module = p->out[part.module] - part.column;
    part.count = in_tile < CHUNK ? in_tile : CHUNK;
    if (in_module < part.count) part.count = in_module;
    part.place += part.column;
    return part;
}

/* One block's h of one module: rows of `stride` bytes, rounded to the dtype, with zeros past the rank. Of bfloat16 where
 * the CPU multiplies pairs of bfloat16, else of float32. */
typedef struct {
    char *values;
    int64_t stride, num_groups;
} Shrunk;

static int64_t shrunk_stride(int64_t width) { return (width + LANES - 1) / LANES * LANES * (int64_t)sizeof(float); }

INLINE void copy_shrunk(const LoraTokens *tokens, int64_t num_tokens, int64_t module, int64_t begin, int64_t rows,
                        int64_t rank, const Shrunk *h, int dtype) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = tokens->expanded + (module * num_tokens + tokens->order[begin + row]) * tokens->width;
        char *to = h->values + row * h->stride;
        for (int64_t first = 0; first < rank; first += LANES) {
            float some[LANES] = {0};
            const int64_t left = rank - first;
            memcpy(some, from + first, (size_t)(left < LANES ? left : LANES) * sizeof(float));
            vec value = load(some);
            if (has_pairs(dtype)) {
                const shorts codes = bfloat16_codes(value);
                memcpy(to + 2 * first, &codes, sizeof codes);
                continue;
            }
            if (dtype == BFLOAT16) value = in_bfloat16(value);
            if (dtype == FLOAT16) value = widened(narrowed(value));
            memcpy(to + 4 * first, &value, sizeof value);
        }
    }
}

/* Where a strip of columns lies in B: a tile, and bytes from the begin of its rows on. */
typedef struct {
    int64_t tile, offset;
} Strip;

/* Unrolled, so that sums[row][pair] are registers. */
#define EACH_ROW _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)
#define EACH_PAIR _Pragma("GCC unroll 8") for (int pair = 0; pair < pairs; pair++)

/* sums[row][pair] = h[row] @ `pairs` pairs of columns of B. Meanwhile the groups of ranks further down, and of the strip
 * `next`, are fetched, unless next is NULL. */
INLINE void mix_strip(const Matrix *b, const Shrunk *h, int64_t first_row, Strip here, const Strip *next,
                      vec sums[MIX_ROWS][MOST_PAIRS][2], int rows, int pairs, int dtype) {
    const int64_t bytes = PAIR * item_bytes(dtype), groups = h->num_groups;
    const char *factors = h->values + first_row * h->stride;
    EACH_ROW EACH_PAIR sums[row][pair][0] = sums[row][pair][1] = (vec){0};
    for (int64_t group = 0; group < groups; group++) {
        const char *page = page_of(b, group, here.tile) + here.offset, *ahead = NULL;
        if (next && group + AHEAD < groups)
            ahead = page_of(b, group + AHEAD, here.tile) + here.offset;
        else if (next && group + AHEAD - groups < groups)
            ahead = page_of(b, group + AHEAD - groups, next->tile) + next->offset;
        for (int rank = 0; rank < PAGE_RANKS; rank += 2) {
            const char *row_of_page = page + rank * b->row_bytes;
            for (int idx = 0; ahead && idx < 2; idx++) fetch(ahead + (rank + idx) * b->row_bytes, pairs * bytes);
#ifdef __AVX512BF16__
            if (dtype == BFLOAT16) {
                EACH_PAIR {
                    bits one, other;
                    memcpy(&one, row_of_page + pair * bytes, sizeof one);
                    memcpy(&other, row_of_page + b->row_bytes + pair * bytes, sizeof other);
                    const __m512bh even = (__m512bh)((one & 0xffffu) | (other << 16));
                    const __m512bh odd = (__m512bh)((one >> 16) | (other & 0xffff0000u));
                    EACH_ROW {
                        int32_t two;
                        memcpy(&two, factors + row * h->stride + 2 * (group * PAGE_RANKS + rank), sizeof two);
                        const __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
                        vec *sum = sums[row][pair];
                        sum[0] = (vec)_mm512_dpbf16_ps((__m512)sum[0], even, factor);
                        sum[1] = (vec)_mm512_dpbf16_ps((__m512)sum[1], odd, factor);
                    }
                }
                continue;
            }
#endif
            for (int idx = 0; idx < 2; idx++)
                EACH_PAIR {
                    vec one, other;
                    load_pair(row_of_page + idx * b->row_bytes, pair * PAIR, dtype, &one, &other);
                    EACH_ROW {
                        float factor;
                        const int64_t place = group * PAGE_RANKS + rank + idx;
                        memcpy(&factor, factors + row * h->stride + 4 * place, sizeof factor);
                        sums[row][pair][0] += factor * one;
                        sums[row][pair][1] += factor * other;
                    }
                }
        }
    }
}

/* The same for one row and the last `count` columns of a tile, which are no whole pair. */
INLINE void mix_part(const Matrix *b, const Shrunk *h, int64_t row, Strip here, int64_t count, vec *first, vec *second,
                     int dtype) {
    *first = *second = (vec){0};
    for (int64_t rank = 0; rank < h->num_groups * PAGE_RANKS; rank++) {
        const char *page = page_of(b, rank / PAGE_RANKS, here.tile) + rank % PAGE_RANKS * b->row_bytes + here.offset;
        const float factor = load_one(h->values + row * h->stride, rank, has_pairs(dtype) ? BFLOAT16 : FLOAT32);
        vec one, other;
        load_part(page, 0, count, dtype, &one, &other);
        *first += factor * one;
        *second += factor * other;
    }
}

#ifdef __AVX512F__
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVENS 0, 2, 4, 6, 8, 10, 12, 14
#define ODDS 1, 3, 5, 7, 9, 11, 13, 15
#endif
#ifdef __clang__
#define SHUFFLE_VECTORS(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE_VECTORS(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif

/* `count` values of a vector from index `at` on, over the pages. */
static void read_vector(const LoraModules *p, int64_t at, int64_t count, float *values) {
    const int64_t page_bytes = PAGE_RANKS * p->tile_width * item_bytes((int)p->dtype), per_page = page_bytes / 4;
    while (count > 0) {
        const int64_t offset = at % per_page, here = per_page - offset < count ? per_page - offset : count;
        const char *page = p->pages + p->page_ids[at / per_page] * page_bytes;
        memcpy(values, page + 4 * offset, (size_t)here * 4);
        values += here, at += here, count -= here;
    }
}

/* Up to PAIR floats, in a pair's order; zeros past count. */
INLINE void load_floats(const float *from, int64_t count, int dtype, vec *first, vec *second) {
    float some[PAIR] = {0};
    if (count < PAIR) {
        memcpy(some, from, (size_t)count * sizeof *from);
        from = some;
    }
    const vec one = load(from), other = load(from + LANES);
    *first = dtype == BFLOAT16 ? SHUFFLE_VECTORS(one, other, EVENS) : one;
    *second = dtype == BFLOAT16 ? SHUFFLE_VECTORS(one, other, ODDS) : other;
}

/* What a part's sums become: y = dora_scale (y - base_bias + scaling (sums + lora_bias)) + base_bias. */
typedef struct {
    const float *dora_scale, *lora_bias, *base_bias; /* of the part's columns, or NULL */
    float scaling;
} Finish;

/* `y` begins where the part does. */
INLINE void finish_pair(const Finish *finish, char *y, int64_t place, int64_t count, vec first, vec second, int dtype) {
    vec one, other;
    if (finish->lora_bias) {
        load_floats(finish->lora_bias + place, count, dtype, &one, &other);
        first += one, second += other;
    }
    if (count >= PAIR)
        load_pair(y, place, dtype, &one, &other);
    else
        load_part(y, place, count, dtype, &one, &other);
    first = one + finish->scaling * first, second = other + finish->scaling * second;
    if (finish->dora_scale) {
        vec own_first = {0}, own_second = {0};
        if (finish->base_bias) load_floats(finish->base_bias + place, count, dtype, &own_first, &own_second);
        load_floats(finish->dora_scale + place, count, dtype, &one, &other);
        first = one * (first - own_first) + own_first;
        second = other * (second - own_second) + own_second;
    }
    if (count >= PAIR)
        store_pair(y, place, dtype, first, second);
    else
        store_part(y, place, count, dtype, first, second);
}

/* The block's rows of y, and what is computed for them. */
typedef struct {
    const LoraModules *p;
    const int32_t *tokens;
    const Matrix *b;
    const Shrunk *h;
    const Part *part;
    const Finish *finish;
} Work;

/* Where the part begins in a row of y. */
INLINE char *row_of_y(const Work *work, int64_t row, int dtype) {
    return (char *)work->p->y + (work->tokens[row] * work->p->y_stride + work->part->place) * item_bytes(dtype);
}

/* Put sums of all rows and pairs into y. */
INLINE void finish_strip(const Finish *finish, char *const *y, int64_t place, const vec *mixed, int64_t rows,
                         int64_t pairs, int dtype) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t pair = 0; pair < pairs; pair++, mixed += 2)
            finish_pair(finish, y[row], place + pair * PAIR, PAIR, mixed[0], mixed[1], dtype);
}

/* The columns from `place` of the part on, which lie at `here`. */
INLINE void expand_strip(const Work *work, char *const *y, int64_t first_row, int64_t place, const Strip *next, int rows,
                         int pairs, int dtype) {
    const Strip here = {work->part->tile, (work->part->offset + place) * item_bytes(dtype)};
    vec sums[MIX_ROWS][MOST_PAIRS][2];
    /* Many rows of 16-bit numbers mostly lie in a cache: fetching them costs more than it saves. Of float32 the strip
     * behind this one is fetched. */
    const int is_many = rows > MIX_ROWS / 2;
    const int64_t item = item_bytes(dtype), fetched = (place + (is_many ? pairs * PAIR : 0)) * item;
    if (!is_many || dtype == FLOAT32) EACH_ROW fetch(y[row] + fetched, pairs * PAIR * item);
    mix_strip(work->b, work->h, first_row, here, next, sums, rows, pairs, dtype);
    if (work->finish->dora_scale || work->finish->lora_bias) {
        vec mixed[2 * MOST_SUMS], *to = mixed;
        EACH_ROW EACH_PAIR {
            *to++ = sums[row][pair][0];
            *to++ = sums[row][pair][1];
        }
        finish_strip(work->finish, y, place, mixed, rows, pairs, dtype);
        return;
    }
    /* The common case, from the registers. */
    const float scaling = work->finish->scaling;
    EACH_ROW EACH_PAIR {
        const int64_t at = place + pair * PAIR;
        vec one, other;
        load_pair(y[row], at, dtype, &one, &other);
        store_pair(y[row], at, dtype, one + scaling * sums[row][pair][0], other + scaling * sums[row][pair][1]);
    }
}

/* Pairs of columns whose sums stay in registers for so many rows. */
INLINE int pairs_of(int64_t rows) {
    if (LANES == 16) return rows == 1 ? 8 : rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
    return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

#define STRIP(count)                                                                                        \
    case count:                                                                                             \
        if (is_wide && pairs_of(count) > 1)                                                                 \
            expand_strip(work, y, first_row, place, next, count, pairs_of(count), dtype);                \
        else                                                                                                \
            expand_strip(work, y, first_row, place, next, count, 1, dtype);                              \
        break;

/* One pair of columns, or as many as stay in registers, from `place` of the part on. Every number of rows is a loop of
 * its own, so that its sums are registers. */
INLINE void expand_rows(const Work *work, char *const *y, int64_t first_row, int64_t place, const Strip *next,
                        int64_t rows, int is_wide, int dtype) {
    switch (rows) {
        STRIP(1) STRIP(2) STRIP(3) STRIP(4)
#if defined(__AVX512F__)
        STRIP(5) STRIP(6) STRIP(7) STRIP(8) STRIP(9) STRIP(10) STRIP(11) STRIP(12)
#endif
    }
}

/* `next`: the part that this task computes next with the same h, or NULL. */
INLINE void expand_part(const Work *work, int64_t rows, const Part *next, int dtype) {
    const int64_t item = item_bytes(dtype), count = work->part->count, num_tiles = (rows + MIX_ROWS - 1) / MIX_ROWS;
    for (int64_t row = 0, tile = 0; row < rows; tile++) {
        const int64_t here = (rows - row + num_tiles - tile - 1) / (num_tiles - tile), wide = pairs_of(here) * PAIR;
        char *y[MIX_ROWS];
        for (int64_t idx = 0; idx < here; idx++) y[idx] = row_of_y(work, row + idx, dtype);
        int64_t place = 0;
        while (place + PAIR <= count) {
            const int64_t end = place + (place + wide <= count ? wide : PAIR);
            Strip following = {work->part->tile, (work->part->offset + end) * item};
            const int is_last = end + PAIR > count;
            if (is_last && next) following = (Strip){next->tile, next->offset * item};
            const Strip *fetched = row == 0 && (!is_last || next) ? &following : NULL;
            expand_rows(work, y, row, place, fetched, here, end - place == wide, dtype);
            place = end;
        }
        row += here;
    }
    const int64_t place = count / PAIR * PAIR;
    const Strip here = {work->part->tile, (work->part->offset + place) * item};
    for (int64_t row = 0; place < count && row < rows; row++) {
        vec first, second;
        mix_part(work->b, work->h, row, here, count - place, &first, &second, dtype);
        finish_pair(work->finish, row_of_y(work, row, dtype), place, count - place, first, second, dtype);
    }
}

/* The chunks `first` to `last` of a block. */
INLINE void expand_chunks(const LoraModules *p, const Step *step, int64_t block, int64_t slot, int64_t first,
                          int64_t last, char *scratch, int dtype) {
    const LoraTokens *tokens = tokens_of(p, step);
    const int64_t begin = tokens->block_start[block], rows = tokens->block_end[block] - begin;
    float *dora_scale = (float *)scratch, *lora_bias = dora_scale + CHUNK;
    Shrunk h = {(char *)(lora_bias + CHUNK), shrunk_stride(tokens->width), 0};
    Matrix b = {0};
    Part part = part_of(p, first), next;
    for (int64_t index = first, module = -1; index < last; index++, part = next) {
        if (index + 1 < last) next = part_of(p, index + 1);
        const int64_t at = part.module * p->num_slots + slot, rank = p->rank[at];
        if (rank == 0 || part.count <= 0) continue;
        if (module != part.module) {
            module = part.module;
            b = matrix_of(p, module, slot, 1);
            h.num_groups = (rank + PAGE_RANKS - 1) / PAGE_RANKS;
            copy_shrunk(tokens, step->num_tokens, module, begin, rows, rank, &h, dtype);
        }
        Finish finish = {.scaling = p->scaling[at]};
        if (p->lora_bias && p->lora_bias[at] >= 0) {
            read_vector(p, p->lora_bias[at] + part.column, part.count, lora_bias);
            finish.lora_bias = lora_bias;
        }
        if (p->dora_scale && p->dora_scale[at] >= 0) {
            read_vector(p, p->dora_scale[at] + part.column, part.count, dora_scale);
            finish.dora_scale = dora_scale;
            finish.base_bias = p->base_bias ? p->base_bias + part.place : NULL;
        }
        const Work work = {p, tokens->order + begin, &b, &h, &part, &finish};
        const int has_next = index + 1 < last && next.module == module && next.count > 0;
        expand_part(&work, rows, has_next ? &next : NULL, dtype);
    }
}

/* Chunks of one task. No bit depends on them. */
static int64_t chunks_of_task(const LoraModules *p, const LoraTokens *tokens, int64_t num_threads) {
    const int64_t fair = tokens->num_blocks * chunks_of_block(p) / (TASKS_OF_THREAD * num_threads);
    return fair < 1 ? 1 : fair < MOST_CHUNKS ? fair : MOST_CHUNKS;
}

static int64_t tasks_of_block(const LoraModules *p, const LoraTokens *tokens, int64_t num_threads) {
    const int64_t chunks = chunks_of_task(p, tokens, num_threads);
    return (chunks_of_block(p) + chunks - 1) / chunks;
}

static int64_t num_expand_tasks(const void *problem, const Step *step, int64_t num_threads) {
    const LoraTokens *tokens = tokens_of(problem, step);
    return tokens ? tokens->num_blocks * tasks_of_block(problem, tokens, num_threads) : 0;
}

static void expand(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    const LoraModules *p = problem;
    const LoraTokens *tokens = tokens_of(p, step);
    const int64_t tasks = tasks_of_block(p, tokens, num_threads), block = task / tasks;
    const int64_t chunks = chunks_of_task(p, tokens, num_threads), first = task % tasks * chunks;
    const int64_t all_chunks = chunks_of_block(p), last = first + chunks < all_chunks ? first + chunks : all_chunks;
    const int64_t slot = slot_of(p, tokens, block);
    if (slot < 0) return;
    if (p->dtype == BFLOAT16)
        expand_chunks(p, step, block, slot, first, last, scratch, BFLOAT16);
    else if (p->dtype == FLOAT16)
        expand_chunks(p, step, block, slot, first, last, scratch, FLOAT16);
    else
        expand_chunks(p, step, block, slot, first, last, scratch, FLOAT32);
}

static int64_t expand_scratch(const void *problem, const Step *step) {
    const LoraTokens *tokens = tokens_of(problem, step);
    if (!tokens) return 0;
    return 2 * CHUNK * (int64_t)sizeof(float) + tokens->block_tokens * shrunk_stride(tokens->width);
}

const OpKind lora_expand_op = {"lora_expand", num_expand_tasks, expand, expand_scratch};
