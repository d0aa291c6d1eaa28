/* A tile of keys and values, read from the cache once and laid out in panels, as kernels/linear/linear.c has its weights:
 * in float32, or in bfloat16 where both are that and the CPU multiplies it.
 */

#ifndef MOTET_ATTENTION_PANELS_H
#define MOTET_ATTENTION_PANELS_H

#include "tile.h"

/* Numbers of a row in one turn. */
INLINE int64_t turn(int paired) { return paired ? 2 : 1; }

/* Where the keys from `start` on lie in the cache, by blocks; -1 for those outside of [first, end). */
static void find_slots(const Tile *tile, int64_t start, int64_t first, int64_t end, int64_t *slots) {
    const int64_t block_size = tile->p->block_size;
    for (int64_t idx = 0; idx < TILE_KEYS; idx++) slots[idx] = -1;
    for (int64_t key = larger(start, first); key < smaller(start + TILE_KEYS, end);) {
        const int64_t block = key / block_size, last = smaller((block + 1) * block_size, smaller(start + TILE_KEYS, end));
        const int64_t slot = (tile->table[block] - block) * block_size;
        for (; key < last; key++) slots[key - start] = slot + key;
    }
}

#ifdef __AVX512F__
#define LOW_FOURS(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_FOURS(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_TWOS(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_TWOS(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define EVEN_QUADS(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_QUADS(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#else
#define LOW_FOURS(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH_FOURS(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_TWOS(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_TWOS(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define EVEN_QUADS(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define ODD_QUADS(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#endif

/* LANES rows of LANES units: rows become columns. */
INLINE void transpose(vec *rows) {
    vec fours[LANES], twos[LANES];
#pragma GCC unroll 8
    for (int row = 0; row < LANES; row += 2) {
        fours[row] = LOW_FOURS(rows[row], rows[row + 1]);
        fours[row + 1] = HIGH_FOURS(rows[row], rows[row + 1]);
    }
    /* Then quad l of twos[4 * g + c] has what rows 4g to 4g + 3 have in column 4l + c. */
#pragma GCC unroll 4
    for (int row = 0; row < LANES; row += 4) {
        twos[row] = LOW_TWOS(fours[row], fours[row + 2]);
        twos[row + 1] = HIGH_TWOS(fours[row], fours[row + 2]);
        twos[row + 2] = LOW_TWOS(fours[row + 1], fours[row + 3]);
        twos[row + 3] = HIGH_TWOS(fours[row + 1], fours[row + 3]);
    }
#pragma GCC unroll 4
    for (int column = 0; column < 4; column++) {
#ifdef __AVX512F__
        const vec even = EVEN_QUADS(twos[column], twos[column + 4]), odd = ODD_QUADS(twos[column], twos[column + 4]);
        const vec even_end = EVEN_QUADS(twos[column + 8], twos[column + 12]);
        const vec odd_end = ODD_QUADS(twos[column + 8], twos[column + 12]);
        rows[column] = EVEN_QUADS(even, even_end);
        rows[column + 8] = ODD_QUADS(even, even_end);
        rows[column + 4] = EVEN_QUADS(odd, odd_end);
        rows[column + 12] = ODD_QUADS(odd, odd_end);
#else
        rows[column] = EVEN_QUADS(twos[column], twos[column + 4]);
        rows[column + 4] = ODD_QUADS(twos[column], twos[column + 4]);
#endif
    }
}

/* LANES neighbouring units of a row, or of pairs the first half of these. */
INLINE vec load_units(const char *from, int is_half, int cache_dtype, int paired) {
    if (!paired) return load_in_order(from, 0, cache_dtype);
#ifdef __AVX512BF16__
    if (cache_dtype == FLOAT8) {
        vec first, second;
        load_cached(from, 0, is_half ? PAIR / 2 : PAIR, FLOAT8, &first, &second);
        return (vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    }
#endif
    return (vec)load_codes(from, is_half ? PAIR / 2 : PAIR);
}

static const char no_key[LINE];

/* Where a tile's row begins, and what follows after it; a row of zeros where there is no key. */
typedef struct {
    const char *from;
    int64_t step;
} Row;

INLINE Row row_of(const Tile *tile, const void *cache, int64_t dim, int64_t slot, int cache_dtype, int paired) {
    if (slot < 0) return (Row){no_key, 0};
    const int64_t place = (slot * tile->p->num_kv_heads + tile->kv_head) * dim;
    return (Row){(const char *)cache + place * item_bytes(cache_dtype), LANES * turn(paired) * item_bytes(cache_dtype)};
}

INLINE void fetch_row(const Tile *tile, const void *cache, int64_t dim, int64_t slot, int cache_dtype) {
    if (slot < 0) return;
    const int64_t bytes = dim * item_bytes(cache_dtype);
    const char *row = (const char *)cache + (slot * tile->p->num_kv_heads + tile->kv_head) * bytes;
    for (int64_t done = 0; done < bytes; done += LINE) __builtin_prefetch(row + done);
}

/* Key panels of the tile's first `count` keys: [turns][PAIR] units each. The next tile's keys are fetched. */
INLINE void lay_keys(const Tile *tile, int64_t count, int cache_dtype, int paired) {
    const Attention *p = tile->p;
    const int64_t turns = p->key_dim / turn(paired);
    for (int64_t key = 0; key < count; key += LANES) {
        Row rows[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            rows[lane] = row_of(tile, p->keys, p->key_dim, tile->slots[key + lane], cache_dtype, paired);
            fetch_row(tile, p->keys, p->key_dim, tile->slots[TILE_KEYS + key + lane], cache_dtype);
        }
        char *to = tile->keys + (key / PAIR * PAIR * turns + key % PAIR) * UNIT;
        for (int64_t first = 0; first < turns; first += LANES) {
            const int64_t num_units = smaller(turns - first, LANES);
            vec units[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                const char *from = rows[lane].from + first / LANES * rows[lane].step;
                units[lane] = load_units(from, num_units < LANES, cache_dtype, paired);
            }
            transpose(units);
            for (int unit = 0; unit < LANES; unit++)
                if (unit < num_units) store((float *)(to + (first + unit) * PAIR * UNIT), units[unit]);
        }
    }
}

/* Value panels of the tile's first `count` keys: [turns][PAIR] units each; zeros where there is no key. */
INLINE void lay_values(const Tile *tile, int64_t count, int cache_dtype, int paired) {
    const Attention *p = tile->p;
    const int64_t panel_bytes = TILE_KEYS / turn(paired) * PAIR * UNIT;
    for (int64_t key = 0; key < count; key += turn(paired)) {
        char *to = tile->values + key / turn(paired) * PAIR * UNIT;
        const Row row = row_of(tile, p->values, p->value_dim, tile->slots[key], cache_dtype, paired);
        fetch_row(tile, p->values, p->value_dim, tile->slots[TILE_KEYS + key], cache_dtype);
        if (paired) {
            const Row other = row_of(tile, p->values, p->value_dim, tile->slots[key + 1], cache_dtype, paired);
            fetch_row(tile, p->values, p->value_dim, tile->slots[TILE_KEYS + key + 1], cache_dtype);
            for (int64_t panel = 0; panel * PAIR < p->value_dim; panel++) {
                const int is_half = p->value_dim - panel * PAIR < PAIR;
                const bits one = (bits)load_units(row.from + panel * row.step, is_half, cache_dtype, paired);
                const bits two = (bits)load_units(other.from + panel * other.step, is_half, cache_dtype, paired);
                store((float *)(to + panel * panel_bytes), (vec)((one & 0xffffu) | (two << 16)));
                store((float *)(to + panel * panel_bytes) + LANES, (vec)((one >> 16) | (two & 0xffff0000u)));
            }
            continue;
        }
        for (int64_t panel = 0; panel * PAIR < p->value_dim; panel++) {
            float *units = (float *)(to + panel * panel_bytes);
            vec first = {0}, second = {0};
            if (row.step && p->value_dim - panel * PAIR >= PAIR)
                load_cached(row.from, panel * PAIR, PAIR, cache_dtype, &first, &second);
            else if (row.step)
                load_cached(row.from, panel * PAIR, PAIR / 2, cache_dtype, &first, &second);
            store(units, first);
            store(units + LANES, second);
        }
    }
}

/* Factors of the scores and of the weights of the tile's keys. */
static void find_scales(const Tile *tile, int64_t count) {
    const Attention *p = tile->p;
    const float scale = p->scale * scale_of_codes(p);
    if (!p->key_scales && !p->value_scales) {
        for (int64_t key = 0; key < count; key += LANES) store(tile->scales + key, all(scale));
        return;
    }
    for (int64_t key = 0; key < count; key++) {
        const int64_t slot = tile->slots[key], place = slot * p->num_kv_heads + tile->kv_head;
        tile->scales[key] = p->key_scales && slot >= 0 ? scale * p->key_scales[place] : scale;
        if (p->value_scales) tile->scales[TILE_KEYS + key] = slot >= 0 ? p->value_scales[place] : 1.0f;
    }
}

#endif
