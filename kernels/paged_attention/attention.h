/* What both attention ops are given, a layer's Attention and a step's AttentionStep, and what both do with scores. */

#ifndef MOTET_ATTENTION_H
#define MOTET_ATTENTION_H

#include "../native/rows.h"

/* Sequences of a step, the longest context first. */
typedef struct {
    int64_t count;
    const int32_t *sequences;    /* [count]: rows of the tables */
    const int32_t *tokens;       /* [count]: first row of the queries and outputs */
    const int32_t *num_queries;  /* [count]: at least 1 */
    const int32_t *context_lens; /* [count]: keys, those of the queries included */
} Sequences;

/* Mirrored by kernels/paged_attention/native_step.py. */
typedef struct AttentionStep {
    const int32_t *tables; /* [num_sequences, table_width]: blocks of the caches */
    int64_t table_width;
    Sequences decodes;  /* with one query */
    Sequences prefills; /* with several */
} AttentionStep;

/* Mirrored by kernels/paged_attention/native.py. Heads of a row are dense; all caches and scales are. */
typedef struct {
    const void *query;         /* [num_tokens, num_heads, key_dim], rows query_stride elements apart */
    const void *keys;          /* [num_blocks, block_size, num_kv_heads, key_dim] */
    const void *values;        /* [num_blocks, block_size, num_kv_heads, value_dim] */
    void *output;              /* [num_tokens, num_heads, value_dim], rows output_stride elements apart */
    const float *sinks;        /* [num_heads] or NULL */
    const float *slopes;       /* [num_heads] or NULL */
    const float *key_scales;   /* [num_blocks, block_size, num_kv_heads] or NULL: 1 */
    const float *value_scales; /* likewise */
    float *parts;              /* motet_attention_part_floats of them, see decode.c */
    int64_t query_stride, output_stride;
    int64_t num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int64_t window; /* keys; 0: all */
    int64_t dtype, cache_dtype;
    float scale, softcap; /* softcap 0: none */
    float value_scale;    /* of all values */
    float padding;
} Attention;

#define INFINITE __builtin_inff()

/* Whether tile.h multiplies in bfloat16. */
INLINE int is_paired(const Attention *p) { return has_pairs((int)p->dtype); }


/* FP8 numbers are read as this part of their value, which needs no product. */
enum { FLOAT8_PART = 256 };

INLINE float scale_of_codes(const Attention *p) { return p->cache_dtype == FLOAT8 ? (float)FLOAT8_PART : 1.0f; }

typedef int8_t codes __attribute__((vector_size(LANES)));
typedef int16_t words __attribute__((vector_size(2 * LANES)));
typedef int8_t pair_of_codes __attribute__((vector_size(PAIR)));
typedef int16_t pair_of_words __attribute__((vector_size(2 * PAIR)));

/* The float16 numbers with the digits of some of FP8 (e4m3fn), each a FLOAT8_PART of it: the exponent is 8 less. The
 * codes 0x7f and 0xff are NaN. `word` has the codes, their sign in all higher bits. */
#define HALVES_OF(word) ({                                          \
    const __typeof__(word) digits = ((word) << 7) & (int16_t)0xbfff; \
    digits | ((digits + 0x80) & 0x4000);                            \
})

/* LANES numbers of FP8. GCC's own widening of codes takes more steps than the CPU's. */
INLINE vec load_float8(const void *from) {
    codes code;
    memcpy(&code, from, sizeof code);
#if defined(__AVX512BW__)
    const words word = (words)_mm256_cvtepi8_epi16((__m128i)code);
#else
    const words word = __builtin_convertvector(code, words);
#endif
    return widened((halves)HALVES_OF(word));
}

/* PAIR numbers of FP8, in their order. */
INLINE void load_pair_float8(const void *from, vec *first, vec *second) {
    pair_of_codes code;
    memcpy(&code, from, sizeof code);
#if defined(__AVX512BW__)
    const pair_of_words word = (pair_of_words)_mm512_cvtepi8_epi16((__m256i)code);
#elif defined(__AVX2__)
    const pair_of_words word = (pair_of_words)_mm256_cvtepi8_epi16((__m128i)code);
#else
    const pair_of_words word = __builtin_convertvector(code, pair_of_words);
#endif
    const pair_of_words half = HALVES_OF(word);
    halves parts[2];
    memcpy(parts, &half, sizeof parts);
    *first = widened(parts[0]);
    *second = widened(parts[1]);
}

/* LANES neighbouring numbers, in their order. */
INLINE vec load_in_order(const void *row, int64_t place, int dtype) {
    return dtype == FLOAT8 ? load_float8((const char *)row + place) : load_lanes(row, place, dtype);
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (bits){__VA_ARGS__})
#endif

/* PAIR numbers of bfloat16, or half of that and zeros. */
INLINE bits load_codes(const void *from, int count) {
    bits codes = {0};
    if (count == PAIR) /* sizes that are known: no call */
        memcpy(&codes, from, sizeof codes);
    else
        memcpy(&codes, from, sizeof codes / 2);
    return codes;
}

/* Some of a row's numbers, PAIR or half of that, as two vectors: of a cache in bfloat16 the even and the odd ones. */
INLINE void load_cached(const void *row, int64_t place, int count, int dtype, vec *first, vec *second) {
    if (dtype == BFLOAT16) {
        const bits both = load_codes((const uint16_t *)row + place, count);
        *first = (vec)(both << 16);
        *second = (vec)(both & 0xffff0000u);
    } else if (dtype == FLOAT8 && count == PAIR) {
        load_pair_float8((const char *)row + place, first, second);
    } else {
        *first = load_in_order(row, place, dtype);
        *second = count == PAIR ? load_in_order(row, place + LANES, dtype) : (vec){0};
    }
}

INLINE void store_output(void *row, int64_t place, int count, int dtype, int is_parted, vec first, vec second) {
    if (is_parted) {
        const bits both = bfloat16_pair(first, second);
        memcpy((uint16_t *)row + place, &both, (size_t)count * 2);
    } else {
        store_lanes(row, place, dtype, first);
        if (count == PAIR) store_lanes(row, place + LANES, dtype, second);
    }
}

/* Runs the statement for each pair of a row, and with LANES of 16 for the half pair at its end. */
#define EACH_PAIR(dim, ...)                                  \
    {                                                        \
        int64_t place = 0;                                   \
        for (; place + PAIR <= (dim); place += PAIR) {       \
            const int count = PAIR;                          \
            __VA_ARGS__                                      \
        }                                                    \
        if (LANES == 16 && place < (dim)) {                  \
            const int count = PAIR / 2;                      \
            __VA_ARGS__                                      \
        }                                                    \
    }

/* The sizes of heads are sixteens: with 16 lanes a row may end in half a pair. */
INLINE int64_t padded_dim(int64_t dim) { return (dim + PAIR - 1) / PAIR * PAIR; }

INLINE int64_t first_visible(const Attention *p, int64_t position) {
    return p->window && position + 1 > p->window ? position + 1 - p->window : 0;
}

INLINE int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE int64_t larger(int64_t one, int64_t other) { return one > other ? one : other; }

/* tanh within 4 units in the last place; by a series near 0, where 1 - e^-2x would lose digits. */
INLINE vec hyperbolic_tangent(vec x) {
    const vec size = (vec)((bits)x & 0x7fffffffu), square = x * x;
    const vec series = x * (1.0f + square * (-0.333333333f + square * (0.133333333f - square * 0.0539682540f)));
    const vec decay = exponential(-2.0f * size), value = (1.0f - decay) / (1.0f + decay);
    return choose(size < 0.1f, series, (vec)((bits)value | ((bits)x & 0x80000000u)));
}

/* e to the x of one number. */
INLINE float exponential_of(float x) { return exponential(all(x))[0]; }

#endif
