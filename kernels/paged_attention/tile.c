/* Attention of many rows over the same keys: the queries of a prompt times the query heads of a key head, or one query
 * of a model with many query heads for each key head.
 *
 * The keys are taken in tiles, which panels.h lays out. Groups of rows that fit into the registers are multiplied with
 * the key panels, the scores become weights as in flash attention (Dao et al. 2022), and these are multiplied with the
 * value panels.
 *
 * A row's bits do not depend on the other rows: each sum goes over the keys in their order, and a key that is hidden
 * from the row adds zero. Tiles of keys begin where the caller says.
 */

#include "panels.h"

int64_t tile_floats(const Attention *p, int64_t rows) {
    const int64_t key_width = padded_dim(p->key_dim), value_width = padded_dim(p->value_dim);
    return rows * (key_width + value_width + LANES) + (rows + LANES) / LANES * LANES +
           TILE_KEYS * (key_width + value_width + ROWS + 2 + 4);
}

/* The parts of `scratch`, for so many rows. */
void tile_place(Tile *tile, int64_t rows, float *scratch) {
    const int64_t key_width = padded_dim(tile->p->key_dim), value_width = padded_dim(tile->p->value_dim);
    tile->value_width = value_width;
    tile->query = (char *)scratch;
    tile->mixed = scratch + rows * key_width;
    tile->total = tile->mixed + rows * value_width;
    tile->keys = (char *)(tile->total + rows * LANES);
    tile->values = tile->keys + TILE_KEYS * key_width * UNIT;
    tile->scores = (float *)(tile->values + TILE_KEYS * value_width * UNIT);
    tile->scales = tile->scores + ROWS * TILE_KEYS;
    tile->slots = (int64_t *)(tile->scales + 2 * TILE_KEYS);
    tile->highest = (float *)(tile->slots + 2 * TILE_KEYS);
}

void tile_load(const Tile *tile) {
    const Attention *p = tile->p;
    const int dtype = (int)p->dtype;
    const int64_t item = item_bytes(dtype), turns = p->key_dim / turn(is_paired(p));
    char *to = tile->query;
    for (int64_t query = 0; query < tile->num_queries; query++) {
        const int64_t row = (tile->token + query) * p->query_stride + tile->first_head * p->key_dim;
        const char *from = (const char *)p->query + row * item;
        for (int64_t head = 0; head < tile->heads; head++, from += p->key_dim * item, to += turns * UNIT) {
            if (is_paired(p))
                memcpy(to, from, (size_t)(turns * UNIT));
            else
                for (int64_t place = 0; place < p->key_dim; place += LANES)
                    store((float *)to + place, load_in_order(from, place, dtype));
        }
    }
}

void tile_clear(const Tile *tile, const float *sinks) {
    const int64_t rows = tile->num_queries * tile->heads;
    memset(tile->mixed, 0, sizeof(float) * (size_t)(rows * tile->value_width));
    memset(tile->total, 0, sizeof(float) * (size_t)(rows * LANES));
    for (int64_t row = 0; row < rows; row++) {
        tile->highest[row] = sinks ? sinks[tile->first_head + row % tile->heads] : -INFINITE;
        if (sinks) tile->total[row * LANES] = 1.0f;
    }
}

#define EACH_ROW _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)

/* sums[row] of x[row] and a panel, over turns. */
INLINE void multiply(const char *x, int64_t x_bytes, const char *panel, int64_t turns, vec (*sums)[2], int rows,
                     int paired) {
    EACH_ROW sums[row][0] = sums[row][1] = (vec){0};
    for (int64_t idx = 0; idx < turns; idx++) {
        const vec one = load((const float *)(panel + idx * PAIR * UNIT));
        const vec other = load((const float *)(panel + idx * PAIR * UNIT) + LANES);
        EACH_ROW {
#ifdef __AVX512BF16__
            if (paired) {
                int32_t two;
                memcpy(&two, x + row * x_bytes + idx * UNIT, sizeof two);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
                sums[row][0] = (vec)_mm512_dpbf16_ps((__m512)sums[row][0], factor, (__m512bh)one);
                sums[row][1] = (vec)_mm512_dpbf16_ps((__m512)sums[row][1], factor, (__m512bh)other);
                continue;
            }
#endif
            float factor;
            memcpy(&factor, x + row * x_bytes + idx * UNIT, sizeof factor);
            sums[row][0] += factor * one;
            sums[row][1] += factor * other;
        }
    }
    (void)paired;
}

/* scores[row] of a panel's keys, times their scales. */
INLINE void score(const char *x, int64_t turns, const char *panel, const float *scales, float *scores, int rows,
                  int paired) {
    vec sums[ROWS][2];
    multiply(x, turns * UNIT, panel, turns, sums, rows, paired);
    const vec one = load(scales), other = load(scales + LANES);
    EACH_ROW {
        store(scores + row * TILE_KEYS, sums[row][0] * one);
        store(scores + row * TILE_KEYS + LANES, sums[row][1] * other);
    }
}

/* mixed[row] = mixed[row] * decays[row] + weights[row] @ a panel. */
INLINE void mix(const char *weights, int64_t turns, const char *panel, const float *decays, float *mixed,
                int64_t value_width, int rows, int paired) {
    vec sums[ROWS][2];
    multiply(weights, TILE_KEYS * UNIT, panel, turns, sums, rows, paired);
    EACH_ROW {
        float *to = mixed + row * value_width;
        store(to, load(to) * decays[row] + sums[row][0]);
        store(to + LANES, load(to + LANES) * decays[row] + sums[row][1]);
    }
}

/* One number for each lane: 0 1 2 .. */
INLINE mask lane_numbers(void) {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    mask lanes;
    memcpy(&lanes, numbers, sizeof lanes);
    return lanes;
}

/* Softcap and slopes; `distance` is the place of the first key, less that of the query. */
static void adjust(const Attention *p, int64_t head, float *scores, int64_t count, int64_t distance) {
    if (p->softcap != 0)
        for (int64_t idx = 0; idx < count; idx += LANES)
            store(scores + idx, p->softcap * hyperbolic_tangent(load(scores + idx) / p->softcap));
    if (p->slopes)
        for (int64_t idx = 0; idx < count; idx += LANES) {
            const mask places = lane_numbers() + (int32_t)(distance + idx);
            store(scores + idx, load(scores + idx) + p->slopes[head] * __builtin_convertvector(places, vec));
        }
}

/* The largest of a row's scores of the keys [begin, end) of the tile, whole panels, and of those before; the row sees the
 * keys [first, last), and the scores of all others become -inf. */
INLINE float highest_of_row(const Tile *tile, int64_t row, float *scores, int64_t begin, int64_t end, int64_t first,
                            int64_t last) {
    if (first > begin || last < end)
        for (int64_t idx = begin; idx < end; idx += LANES) {
            const mask places = lane_numbers() + (int32_t)idx;
            store(scores + idx, choose((places >= (int32_t)first) & (places < (int32_t)last), load(scores + idx), all(-INFINITE)));
        }
    vec lanes = all(tile->highest[row]);
    for (int64_t idx = begin; idx < end; idx += LANES) lanes = larger_lanes(load(scores + idx), lanes);
    return highest_of(lanes);
}

/* With scores of -inf alone all weights are 0, not NaN. */
INLINE vec shift_of(vec highest) { return choose(highest == -INFINITE, (vec){0}, highest); }

/* A row's scores of the keys [begin, end) of the tile to weights. The row's sums so far are multiplied by `decay`. */
INLINE void weigh_row(const Tile *tile, int64_t row, float *scores, int64_t begin, int64_t end, float shift, float decay,
                      int paired) {
    const int is_scaled = tile->p->value_scales != NULL;
    vec total = {0};
    for (int64_t idx = begin; idx < end; idx += PAIR) {
        vec one = exponential(load(scores + idx) - shift), other = exponential(load(scores + idx + LANES) - shift);
        total += one + other;
        if (is_scaled) {
            one *= load(tile->scales + TILE_KEYS + idx);
            other *= load(tile->scales + TILE_KEYS + idx + LANES);
        }
#ifdef __AVX512BF16__
        if (paired) {
            const vec both = (vec)_mm512_cvtne2ps_pbh((__m512)other, (__m512)one);
            store(scores + idx / 2, both);
            continue;
        }
#endif
        store(scores + idx, one);
        store(scores + idx + LANES, other);
    }
    (void)paired;
    float *sums = tile->total + row * LANES;
    store(sums, load(sums) * decay + total);
}

#define EACH_COUNT(call)                                                                                       \
    switch (rows) {                                                                                            \
        case 1: call(1); break;                                                                                \
        case 2: call(2); break;                                                                                \
        case 3: call(3); break;                                                                                \
        case 4: call(4); break;                                                                                \
        MORE_COUNTS(call)                                                                                      \
    }
#ifdef __AVX512F__
#define MORE_COUNTS(call)                                                                                      \
    case 5: call(5); break;                                                                                    \
    case 6: call(6); break;                                                                                    \
    case 7: call(7); break;                                                                                    \
    case 8: call(8); break;                                                                                    \
    case 9: call(9); break;                                                                                    \
    case 10: call(10); break;                                                                                  \
    case 11: call(11); break;                                                                                  \
    case 12: call(12); break;
#else
#define MORE_COUNTS(call)
#endif

/* Every number of rows is a loop of its own, so that its sums are registers. */
#define SCORE(count) score(x, turns, panel, scales, scores, count, paired)
#define MIX(count) mix(weights, turns, panel, decays, mixed, value_width, count, paired)
#define KERNELS(suffix, paired_or_not)                                                                         \
    static __attribute__((noinline)) void score_##suffix(const char *x, int64_t turns, const char *panel,      \
                                                         const float *scales, float *scores, int64_t rows) {   \
        enum { paired = paired_or_not };                                                                       \
        EACH_COUNT(SCORE)                                                                                      \
    }                                                                                                          \
    static __attribute__((noinline)) void mix_##suffix(const char *weights, int64_t turns, const char *panel,  \
                                                       const float *decays, float *mixed, int64_t value_width, \
                                                       int64_t rows) {                                         \
        enum { paired = paired_or_not };                                                                       \
        EACH_COUNT(MIX)                                                                                        \
    }
KERNELS(floats, 0)
#ifdef __AVX512BF16__
KERNELS(pairs, 1)
#else
#define score_pairs score_floats
#define mix_pairs mix_floats
#endif

/* Keys of the tile in hand, by their places in the sequence. */
typedef struct {
    int64_t start, first, end; /* [first, end) are seen by some row; the panels begin with `start` */
    int is_infinite;           /* whether some value is no finite number; -1: not looked at */
} Keys;

static int64_t panel_of_values(int paired) { return TILE_KEYS / turn(paired) * PAIR * UNIT; }

static int look_for_infinite(const Tile *tile, const Keys *keys, int paired) {
    const int64_t turns = (keys->end - keys->start + turn(paired) - 1) / turn(paired);
    bits found = {0};
    for (int64_t place = 0; place < tile->value_width; place += PAIR) {
        const float *panel = (const float *)(tile->values + place / PAIR * panel_of_values(paired));
        for (int64_t idx = 0; idx < turns * PAIR; idx += LANES) {
            const bits unit = (bits)load(panel + idx);
            found |= (bits)((unit & 0x7f800000u) == 0x7f800000u);
            if (paired) found |= (bits)((unit & 0x7f80u) == 0x7f80u);
        }
    }
    return sum_of((vec)(found & 0x3f800000u)) != 0;
}

/* As `mix` for one row, which sees the keys [first, last) of the tile. Infinite values beside them do not reach it. */
static void mix_alone(const Tile *tile, const float *weights, int64_t first, int64_t last, const float *decay,
                      float *mixed, int paired) {
    const int64_t begin = first / turn(paired), end = (last + turn(paired) - 1) / turn(paired);
    for (int64_t place = 0; place < tile->value_width; place += PAIR) {
        char *panel = tile->values + place / PAIR * panel_of_values(paired);
        bits *edges[] = {(bits *)(panel + begin * PAIR * UNIT), (bits *)(panel + (end - 1) * PAIR * UNIT)};
        bits saved[4];
        if (paired && first < last) {
            memcpy(saved, edges[0], sizeof saved / 2);
            memcpy(saved + 2, edges[1], sizeof saved / 2);
            for (int half = 0; half < 2; half++) {
                if (first % 2) edges[0][half] &= 0xffff0000u;
                if (last % 2) edges[1][half] &= 0xffffu;
            }
        }
        const char *from = (const char *)weights + begin * UNIT;
        const int64_t turns = larger(end - begin, 0);
        if (paired)
            mix_pairs(from, turns, panel + begin * PAIR * UNIT, decay, mixed + place, tile->value_width, 1);
        else
            mix_floats(from, turns, panel + begin * PAIR * UNIT, decay, mixed + place, tile->value_width, 1);
        if (paired && first < last) {
            memcpy(edges[1], saved + 2, sizeof saved / 2);
            memcpy(edges[0], saved, sizeof saved / 2);
        }
    }
}

/* Adds the tile's keys to a group of rows. */
INLINE void attend_group(const Tile *tile, Keys *keys, int64_t first_row, int64_t rows, int paired) {
    const Attention *p = tile->p;
    const int64_t turns = p->key_dim / turn(paired), start = keys->start;
    int64_t first[ROWS], last[ROWS];
    for (int64_t row = 0; row < rows; row++) {
        const int64_t position = tile->position + (first_row + row) / tile->heads;
        first[row] = larger(keys->first, first_visible(p, position)) - start;
        last[row] = smaller(keys->end, position + 1) - start;
    }
    const int64_t begin = first[0] / PAIR * PAIR, last_of_all = last[rows - 1];
    const int64_t end = (last_of_all + PAIR - 1) / PAIR * PAIR;
    if (first[0] >= last_of_all) return;
    const char *x = tile->query + first_row * turns * UNIT;
    for (int64_t key = begin; key < end; key += PAIR) {
        const char *panel = tile->keys + key * turns * UNIT;
        if (paired)
            score_pairs(x, turns, panel, tile->scales + key, tile->scores + key, rows);
        else
            score_floats(x, turns, panel, tile->scales + key, tile->scores + key, rows);
    }
    float before[LANES] = {0}, highest[LANES] = {0}, shifts[LANES], decays[LANES]; /* of up to ROWS rows */
    memcpy(before, tile->highest + first_row, sizeof(float) * (size_t)rows);
    for (int64_t row = 0; row < rows; row++) {
        float *scores = tile->scores + row * TILE_KEYS;
        const int64_t query = (first_row + row) / tile->heads, head = tile->first_head + (first_row + row) % tile->heads;
        if (p->softcap != 0 || p->slopes)
            adjust(p, head, scores + begin, end - begin, start + begin - tile->position - query);
        highest[row] = highest_of_row(tile, first_row + row, scores, begin, end, first[row], last[row]);
    }
    const vec shift = shift_of(load(highest));
    store(shifts, shift);
    store(decays, exponential(load(before) - shift));
    memcpy(tile->highest + first_row, highest, sizeof(float) * (size_t)rows);
    for (int64_t row = 0; row < rows; row++)
        weigh_row(tile, first_row + row, tile->scores + row * TILE_KEYS, begin, end, shifts[row], decays[row], paired);
    float *mixed = tile->mixed + first_row * tile->value_width;
    const int is_cut = first[rows - 1] > first[0] || last[0] < last_of_all;
    if (is_cut && keys->is_infinite < 0) keys->is_infinite = look_for_infinite(tile, keys, paired);
    if (is_cut && keys->is_infinite) {
        for (int64_t row = 0; row < rows; row++)
            mix_alone(tile, tile->scores + row * TILE_KEYS, first[row], last[row], decays + row,
                      mixed + row * tile->value_width, paired);
        return;
    }
    const int64_t from = begin / turn(paired), num_turns = (last_of_all + turn(paired) - 1) / turn(paired) - from;
    const char *weights = (const char *)(tile->scores + from);
    for (int64_t place = 0; place < p->value_dim; place += PAIR) {
        const char *panel = tile->values + place / PAIR * panel_of_values(paired) + from * PAIR * UNIT;
        if (paired)
            mix_pairs(weights, num_turns, panel, decays, mixed + place, tile->value_width, rows);
        else
            mix_floats(weights, num_turns, panel, decays, mixed + place, tile->value_width, rows);
    }
}

/* Adds the keys from `start` to `end` that the rows see to their sums. */
INLINE void attend_keys_of(const Tile *tile, int64_t start, int64_t end, int cache_dtype, int paired) {
    const int64_t first = first_visible(tile->p, tile->position), rows = tile->num_queries * tile->heads;
    const int64_t num_groups = (rows + ROWS - 1) / ROWS;
    find_slots(tile, start, first, end, tile->slots);
    for (; start < end; start += TILE_KEYS) {
        find_slots(tile, start + TILE_KEYS, first, end, tile->slots + TILE_KEYS);
        Keys keys = {start, larger(start, first), smaller(start + TILE_KEYS, end), -1};
        const int64_t count = (keys.end - start + PAIR - 1) / PAIR * PAIR;
        lay_keys(tile, count, cache_dtype, paired);
        lay_values(tile, count, cache_dtype, paired);
        find_scales(tile, count);
        for (int64_t group = 0, row = 0; group < num_groups; group++) {
            const int64_t some = (rows - row + num_groups - group - 1) / (num_groups - group);
            attend_group(tile, &keys, row, some, paired);
            row += some;
        }
        memcpy(tile->slots, tile->slots + TILE_KEYS, sizeof(int64_t) * TILE_KEYS);
    }
}

#define ATTEND(name, cache_dtype, paired)                                                          \
    static __attribute__((noinline)) void name(const Tile *tile, int64_t start, int64_t end) {     \
        attend_keys_of(tile, start, end, cache_dtype, paired);                                     \
    }
ATTEND(attend_float32, FLOAT32, 0)
ATTEND(attend_bfloat16, BFLOAT16, 0)
ATTEND(attend_float16, FLOAT16, 0)
ATTEND(attend_float8, FLOAT8, 0)
#ifdef __AVX512BF16__
ATTEND(attend_bfloat16_pairs, BFLOAT16, 1)
ATTEND(attend_float8_pairs, FLOAT8, 1)
#endif

void tile_attend(const Tile *tile, int64_t start, int64_t end) {
    const Attention *p = tile->p;
#ifdef __AVX512BF16__
    if (is_paired(p)) {
        (p->cache_dtype == FLOAT8 ? attend_float8_pairs : attend_bfloat16_pairs)(tile, start, end);
        return;
    }
#endif
    static void (*const attends[])(const Tile *, int64_t, int64_t) = {
        [FLOAT32] = attend_float32, [BFLOAT16] = attend_bfloat16, [FLOAT16] = attend_float16, [FLOAT8] = attend_float8};
    attends[p->cache_dtype](tile, start, end);
}

void tile_write(const Tile *tile) {
    const Attention *p = tile->p;
    const float scale = p->value_scale * scale_of_codes(p);
    for (int64_t row = 0; row < tile->num_queries * tile->heads; row++) {
        const int64_t token = tile->token + row / tile->heads, head = tile->first_head + row % tile->heads;
        char *output = (char *)p->output + token * p->output_stride * item_bytes((int)p->dtype);
        const float *mixed = tile->mixed + row * tile->value_width, total = sum_of(load(tile->total + row * LANES));
        EACH_PAIR(p->value_dim, {
            const vec first = load(mixed + place) / total * scale, second = load(mixed + place + LANES) / total * scale;
            store_output(output, head * p->value_dim + place, count, (int)p->dtype, is_parted(p), first, second);
        })
    }
}
