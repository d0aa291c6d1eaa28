/* How a token's keys and values are written to their position in a paged cache: alone (store_kv.c), or behind the rotation
 * (rope.c). */

#ifndef MOTET_STORE_H
#define MOTET_STORE_H

#include "../native/rows.h"

/* As kernels/fp8.py has them. */
#define FP8_MAX 448.0f
#define MIN_SCALE 0x1p-64f

typedef uint8_t bytes __attribute__((vector_size(LANES)));

/* Keys or values. Mirrored by kernels/store_kv/native.py. */
typedef struct {
    void *tokens;  /* [num_tokens, heads, dim] */
    void *cache;   /* [num_kv_positions, heads, dim]; NULL: nothing is stored */
    float *scales; /* [num_kv_positions, heads], written, of an FP8 cache with a scale per token and head; else NULL */
    int64_t stride, head_stride, dim; /* of tokens, in elements */
    float inverse_scale;              /* of an FP8 cache with one scale */
} Part;

/* Mirrored by kernels/store_kv/native.py. */
typedef struct {
    Part key, value;
    int64_t num_heads, num_kv_positions;
    int64_t dtype, cache_dtype; /* of the tokens, and of both caches */
} Store;

/* The e4m3fn codes of numbers of at most 448 in size, to the nearest, ties to even; NaN is NaN. */
INLINE bits fp8_codes(vec value) {
    const bits code = (bits)value, sign = code & 0x80000000u, size = code ^ sign;
    /* Below 2^-6 codes are 2^-9 apart, the distance of floats from 2^14 on: adding 2^14 rounds. */
    const bits small = (bits)((vec)size + 0x1p14f) - 0x46800000u;
    /* Else three bits of the fraction stay, and the exponent's bias is 7 instead of 127. */
    const bits normal = (size - (120u << 23) + 0x7ffffu + ((size >> 20) & 1u)) >> 20;
    const vec nearest = choose((vec)size < 0x1p-6f, (vec)small, (vec)normal);
    return (bits)choose(value == value, nearest, (vec)((bits){0} + 0x7fu)) | (sign >> 24);
}

/* The largest size of `count` numbers in a padded buffer; NaN where one is NaN. */
INLINE float largest_size(const float *values, int64_t count) {
    vec most = {0};
    for (int64_t place = 0; place < count; place += LANES) {
        const vec size = (vec)((bits)load(values + place) & 0x7fffffffu);
        most = choose((size > most) | (size != size), size, most);
    }
    float lanes[LANES], largest = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++)
        if (lanes[lane] > largest || lanes[lane] != lanes[lane]) largest = lanes[lane];
    return largest;
}

INLINE void quantize(const float *values, int64_t count, float inverse, uint8_t *to) {
    for (int64_t place = 0; place < count; place += LANES) {
        vec scaled = load(values + place) * inverse;
        scaled = choose(scaled > FP8_MAX, all(FP8_MAX), scaled);
        scaled = choose(scaled < -FP8_MAX, all(-FP8_MAX), scaled);
        const bytes codes = __builtin_convertvector(fp8_codes(scaled), bytes);
        memcpy(to + place, &codes, (size_t)(count - place < LANES ? count - place : LANES));
    }
}

INLINE void store_head(const Part *part, const void *head, int64_t place, int dtype, int cache_dtype, float *scratch) {
    void *to = (char *)part->cache + place * part->dim * item_bytes(cache_dtype);
    if (cache_dtype == dtype) {
        memcpy(to, head, (size_t)(part->dim * item_bytes(dtype)));
        return;
    }
    widen(head, part->dim, dtype, scratch);
    if (cache_dtype != FLOAT8) {
        narrow(scratch, part->dim, cache_dtype, to);
        return;
    }
    float inverse = part->inverse_scale;
    if (part->scales) {
        float scale = largest_size(scratch, part->dim) * (float)(1.0 / FP8_MAX);
        if (scale < MIN_SCALE) scale = MIN_SCALE;
        part->scales[place] = scale;
        inverse = 1.0f / scale;
    }
    quantize(scratch, part->dim, inverse, to);
}

INLINE void store_part_of_token(const Store *p, const Part *part, int64_t token, int64_t kv_position, int dtype,
                                int cache_dtype, float *scratch) {
    const char *tokens = (const char *)part->tokens + token * part->stride * item_bytes(dtype);
    for (int64_t head = 0; head < p->num_heads; head++) {
        const void *values = tokens + head * part->head_stride * item_bytes(dtype);
        store_head(part, values, kv_position * p->num_heads + head, dtype, cache_dtype, scratch);
    }
}

/* Writes a token's keys and values to its KV position. A position outside the caches, such as -1, is skipped. */
INLINE void store_token(const Store *p, int64_t token, int64_t kv_position, int dtype, float *scratch) {
    if (kv_position < 0 || kv_position >= p->num_kv_positions) return;
    const Part *parts[] = {&p->key, &p->value};
    for (int part = 0; part < 2; part++) {
        if (p->cache_dtype == dtype)
            store_part_of_token(p, parts[part], token, kv_position, dtype, dtype, scratch);
        else if (p->cache_dtype == FLOAT8)
            store_part_of_token(p, parts[part], token, kv_position, dtype, FLOAT8, scratch);
        else
            store_part_of_token(p, parts[part], token, kv_position, dtype, (int)p->cache_dtype, scratch);
    }
}

/* Floats that store_token needs. */
INLINE int64_t store_scratch(const Store *p) {
    return padded(p->key.dim > p->value.dim ? p->key.dim : p->value.dim);
}

#endif
