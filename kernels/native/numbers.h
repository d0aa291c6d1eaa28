/* Vectors of floats, and the 16-bit element types that they are loaded from and rounded to.
 *
 * A pair is 2 * LANES neighbouring numbers of a row, held as two vectors. Of float32 and float16 the vectors are the
 * first and the second half. Of bfloat16 they are the even and the odd numbers: that is how they come apart without a
 * shuffle. Products of two pairs of one type need no other order, and store_pair puts them back.
 */

#ifndef MOTET_NUMBERS_H
#define MOTET_NUMBERS_H

#include <stdint.h>
#include <string.h>

#include "ops.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
enum { PAIR = 2 * LANES, LINE = 64 };

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
typedef _Float16 halves __attribute__((vector_size(2 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef float quad __attribute__((vector_size(16)));
typedef int32_t mask_of_quad __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t item_bytes(int dtype) { return dtype == FLOAT32 ? 4 : dtype == FLOAT8 ? 1 : 2; }

INLINE vec load(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, vec value) { memcpy(to, &value, sizeof value); }

/* Whether the CPU multiplies numbers of this type itself, in pairs: else they are widened to float32. */
INLINE int has_pairs(int dtype) {
#ifdef __AVX512BF16__
    return dtype == BFLOAT16;
#else
    (void)dtype;
    return 0;
#endif
}

/* For a vector that several products share: GCC would load it again for each, and then the loads are the bound. */
INLINE vec in_register(vec value) {
#ifdef __AVX2__
    __asm__("" : "+v"(value));
#endif
    return value;
}

INLINE vec all(float value) { return value - (vec){0}; }

INLINE vec choose(mask where, vec yes, vec no) { return (vec)(((bits)yes & (bits)where) | ((bits)no & ~(bits)where)); }

/* The larger lanes; those of `other` where one of both is NaN. */
INLINE vec larger_lanes(vec some, vec other) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)some, (__m512)other);
#elif defined(__AVX__) && defined(__F16C__)
    return (vec)_mm256_max_ps((__m256)some, (__m256)other);
#else
    return choose(some > other, some, other);
#endif
}

/* The bfloat16 codes of a vector, in the high halves: to the nearest, ties to even; NaN stays one. */
INLINE bits rounded(vec value) {
    const bits code = (bits)value;
    const bits nearest = code + 0x7fffu + ((code >> 16) & 1u);
    return (bits)choose(value == value, (vec)nearest, (vec)(code | 0x400000u)) & 0xffff0000u;
}

/* Numbers rounded to bfloat16. CPUs that convert to it themselves do so at a third of the cost, and turn numbers below
 * 2^-126 to 0, which is also what their products of bfloat16 take such numbers for. */
INLINE vec in_bfloat16(vec value) {
#ifdef __AVX512BF16__
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)value)), 16);
#else
    return (vec)rounded(value);
#endif
}

/* The same as codes, in their order. */
INLINE shorts bfloat16_codes(vec value) {
#ifdef __AVX512BF16__
    return (shorts)_mm512_cvtneps_pbh((__m512)value);
#else
    return __builtin_convertvector(rounded(value) >> 16, shorts);
#endif
}

/* The codes of a pair, as they follow one another in a row. */
INLINE bits bfloat16_pair(vec first, vec second) {
#ifdef __AVX512BF16__
    static const uint16_t order[PAIR] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i codes = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (bits)_mm512_permutexvar_epi16(_mm512_loadu_si512(order), codes);
#else
    return (rounded(first) >> 16) | rounded(second);
#endif
}

/* GCC's own conversions of vectors of float16 go number by number. */
INLINE vec widened(halves value) {
#if defined(__F16C__) && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)value);
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps((__m128i)value);
#else
    return __builtin_convertvector(value, vec);
#endif
}

INLINE halves narrowed(vec value) {
#if defined(__F16C__) && defined(__AVX512F__)
    return (halves)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    return __builtin_convertvector(value, halves);
#endif
}

INLINE void load_pair(const void *row, int64_t place, int dtype, vec *first, vec *second) {
    if (dtype == BFLOAT16) {
        bits both;
        memcpy(&both, (const uint16_t *)row + place, sizeof both);
        *first = (vec)(both << 16);
        *second = (vec)(both & 0xffff0000u);
    } else if (dtype == FLOAT16) {
        halves one, other;
        memcpy(&one, (const uint16_t *)row + place, sizeof one);
        memcpy(&other, (const uint16_t *)row + place + LANES, sizeof other);
        *first = widened(one);
        *second = widened(other);
    } else {
        memcpy(first, (const float *)row + place, sizeof *first);
        memcpy(second, (const float *)row + place + LANES, sizeof *second);
    }
}

INLINE void store_pair(void *row, int64_t place, int dtype, vec first, vec second) {
    if (dtype == BFLOAT16) {
        const bits both = bfloat16_pair(first, second);
        memcpy((uint16_t *)row + place, &both, sizeof both);
    } else if (dtype == FLOAT16) {
        const halves one = narrowed(first), other = narrowed(second);
        memcpy((uint16_t *)row + place, &one, sizeof one);
        memcpy((uint16_t *)row + place + LANES, &other, sizeof other);
    } else {
        memcpy((float *)row + place, &first, sizeof first);
        memcpy((float *)row + place + LANES, &second, sizeof second);
    }
}

/* Single numbers, for the ends of rows that are no whole pairs. */
INLINE float load_one(const void *row, int64_t place, int dtype) {
    if (dtype == BFLOAT16) {
        const uint32_t code = (uint32_t)((const uint16_t *)row)[place] << 16;
        float value;
        memcpy(&value, &code, sizeof value);
        return value;
    }
    if (dtype == FLOAT16) {
        _Float16 value;
        memcpy(&value, (const uint16_t *)row + place, sizeof value);
        return (float)value;
    }
    return ((const float *)row)[place];
}

INLINE void store_one(void *row, int64_t place, int dtype, float value) {
    if (dtype == BFLOAT16) {
        uint32_t code;
        memcpy(&code, &value, sizeof code);
        const uint32_t nearest = value == value ? code + 0x7fffu + ((code >> 16) & 1u) : code | 0x400000u;
        ((uint16_t *)row)[place] = (uint16_t)(nearest >> 16);
    } else if (dtype == FLOAT16) {
        const _Float16 half = (_Float16)value;
        memcpy((uint16_t *)row + place, &half, sizeof half);
    } else {
        ((float *)row)[place] = value;
    }
}

/* Like load_pair and store_pair for the first `count` numbers of a pair; what is past them loads as 0. */
INLINE void load_part(const void *row, int64_t place, int64_t count, int dtype, vec *first, vec *second) {
    char whole[4 * PAIR] = {0};
    const int64_t item = item_bytes(dtype);
    memcpy(whole, (const char *)row + place * item, (size_t)(count * item));
    load_pair(whole, 0, dtype, first, second);
}

INLINE void store_part(void *row, int64_t place, int64_t count, int dtype, vec first, vec second) {
    char whole[4 * PAIR];
    const int64_t item = item_bytes(dtype);
    store_pair(whole, 0, dtype, first, second);
    memcpy((char *)row + place * item, whole, (size_t)(count * item));
}

/* Sum over the lanes, in one fixed order: each half on the other, down to one. */
INLINE float sum_of(vec value) {
    quad parts[LANES / 4];
    memcpy(parts, &value, sizeof parts);
    for (int width = LANES / 8; width; width /= 2)
        for (int part = 0; part < width; part++) parts[part] += parts[part + width];
    return (parts[0][0] + parts[0][2]) + (parts[0][1] + parts[0][3]);
}

INLINE float larger_of(float one, float other) { return one > other ? one : other; }

/* The largest lane; -infinity where all are NaN, which is passed over. */
INLINE float highest_of(vec value) {
    quad parts[LANES / 4];
    memcpy(parts, &value, sizeof parts);
    quad highest = -__builtin_inff() - (quad){0};
    for (int part = 0; part < LANES / 4; part++) {
        const mask_of_quad is_larger = parts[part] > highest;
        highest = (quad)(((mask_of_quad)parts[part] & is_larger) | ((mask_of_quad)highest & ~is_larger));
    }
    return larger_of(larger_of(highest[0], highest[2]), larger_of(highest[1], highest[3]));
}

/* e to the x, within 2 units in the last place; 0 below -87.3, infinity above 88.7. Polynomial of Cephes' expf. */
INLINE vec exponential(vec x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, found in the low bits */
    const vec shifted = x * 1.44269504f + magic, whole = shifted - magic;
    vec rest = x - whole * 0.693359375f;
    rest = rest + whole * 2.12194440e-4f;
    vec series = 1.9875691500e-4f * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
#ifdef __AVX512F__
    /* One instruction multiplies by the power of two; the same bits as below. */
    const __m512 value = _mm512_scalef_ps((__m512)series, (__m512)whole);
    const __mmask16 is_in_range = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ);
    const __mmask16 is_high = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(88.7f), _CMP_GT_OQ);
    return (vec)_mm512_mask_mov_ps(_mm512_maskz_mov_ps(is_in_range, value), is_high, _mm512_set1_ps(__builtin_inff()));
#else
    /* The power of two in two steps, so that 2^128 is reached without passing infinity. */
    const bits steps = (bits)shifted - 0x4b400000u, half = (bits)((mask)steps >> 1);
    const vec value = series * (vec)((half << 23) + 0x3f800000u) * (vec)(((steps - half) << 23) + 0x3f800000u);
    const vec low = choose(x < -87.3f, (vec){0}, value);
    return choose(x > 88.7f, all(__builtin_inff()), choose(x == x, low, x));
#endif
}

#endif
