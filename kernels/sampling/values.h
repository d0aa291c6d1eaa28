/* What the sampling ops share: their problem, a row's values, and the float64 functions that scores and noise are made
 * of. kernels/sampling/reference.py is the definition.
 *
 * Vectors of float64 have LANES / 2 numbers. Nothing here depends on how a row is cut: a number's bits are its own.
 */

#ifndef MOTET_SAMPLING_H
#define MOTET_SAMPLING_H

#include "../native/rows.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

/* Tokens of a part, which is a task of its own, and of a tile, whose values are at hand as float32. */
enum { PART = 16384, TILE = 1024, WIDE = LANES / 2 };

typedef double wide __attribute__((vector_size(8 * WIDE)));
typedef uint64_t words __attribute__((vector_size(8 * WIDE)));
typedef int64_t longs __attribute__((vector_size(8 * WIDE)));
typedef float narrow_floats __attribute__((vector_size(4 * WIDE)));

/* Mirrored by kernels/sampling/native.py. n is the step's number of tokens. */
typedef struct {
    const void *logits;    /* [n, vocab] */
    const float *adjusted; /* [m, vocab], read for the rows that have a source */
    const int32_t *source; /* [n] row of adjusted, -1 for none; NULL: none has one */
    /* How rows draw; temperature is NULL where all are greedy, and then no other is read. */
    const float *temperature, *top_p, *min_p;  /* [n] */
    const int64_t *top_k, *seed, *position;    /* [n] */
    /* Of each part: the largest value and its first token, and whether all logits are finite. [n, parts] */
    float *highest;
    int64_t *highest_token;
    uint8_t *is_finite_part;
    /* Of each part of a row that draws: the best score with its noise, and its token. [n, parts] */
    double *best;
    int64_t *best_token;
    float *lowest; /* [n] least value that top-k and top-p keep */
    /* The results, [n]: tokens, 0 in rows whose logits are not all finite, and whether they are. */
    int64_t *tokens;
    uint8_t *is_finite;
    int64_t stride, vocab, dtype; /* of the logits */
} Sampling;

INLINE int64_t num_parts(const Sampling *p) { return (p->vocab + PART - 1) / PART; }

INLINE int64_t end_of_part(const Sampling *p, int64_t part) {
    return (part + 1) * PART < p->vocab ? (part + 1) * PART : p->vocab;
}

INLINE int draws(const Sampling *p, int64_t row) { return p->temperature && p->temperature[row] > 0; }

INLINE const void *logits_of(const Sampling *p, int64_t row) {
    return (const char *)p->logits + row * p->stride * item_bytes((int)p->dtype);
}

/* The row's adjusted values, or NULL for one whose logits are its values. */
INLINE const float *adjusted_of(const Sampling *p, int64_t row) {
    return p->source && p->source[row] >= 0 ? p->adjusted + p->source[row] * p->vocab : NULL;
}

/* Values [begin, end) of a row as float32, and NaN behind them; `values` is as long as padded(TILE). */
INLINE void load_tile(const Sampling *p, int64_t row, int64_t begin, int64_t end, float *values) {
    const float *adjusted = adjusted_of(p, row);
    const char *logits = (const char *)logits_of(p, row) + begin * item_bytes((int)p->dtype);
    if (adjusted)
        widen(adjusted + begin, end - begin, FLOAT32, values);
    else if (p->dtype == BFLOAT16)
        widen(logits, end - begin, BFLOAT16, values);
    else if (p->dtype == FLOAT16)
        widen(logits, end - begin, FLOAT16, values);
    else
        widen(logits, end - begin, FLOAT32, values);
    for (int64_t place = end - begin; place < padded(end - begin); place++) values[place] = __builtin_nanf("");
}

INLINE float highest_of_row(const Sampling *p, int64_t row) {
    const int64_t parts = num_parts(p);
    float highest = p->highest[row * parts];
    for (int64_t part = 1; part < parts; part++)
        if (p->highest[row * parts + part] > highest) highest = p->highest[row * parts + part];
    return highest;
}

/* float32 as uint32 in the same order; -0 is 0. */
INLINE uint32_t ordered(float value) {
    const float plain = value + 0.0f;
    uint32_t code;
    memcpy(&code, &plain, sizeof code);
    return code ^ (code >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The float of an ordered integer; below that of -infinity there are none but NaN, and -infinity is given. */
INLINE float value_of(uint32_t key) {
    if (key <= 0x007fffffu) return -__builtin_inff();
    const uint32_t code = key >> 31 ? key ^ 0x80000000u : ~key;
    float value;
    memcpy(&value, &code, sizeof value);
    return value;
}

INLINE wide all_wide(double value) { return value - (wide){0}; }

INLINE words all_words(uint64_t value) { return value - (words){0}; }

INLINE wide choose_wide(longs where, wide yes, wide no) {
    return (wide)(((words)yes & (words)where) | ((words)no & ~(words)where));
}

INLINE wide load_wide(const float *values) {
    narrow_floats value;
    memcpy(&value, values, sizeof value);
    return __builtin_convertvector(value, wide);
}

INLINE int any_of(longs where) {
#if defined(__AVX512F__)
    return _mm512_test_epi64_mask((__m512i)where, (__m512i)where) != 0;
#elif defined(__AVX__)
    return !_mm256_testz_si256((__m256i)where, (__m256i)where);
#else
    int64_t lanes[WIDE], any = 0;
    memcpy(lanes, &where, sizeof lanes);
    for (int lane = 0; lane < WIDE; lane++) any |= lanes[lane];
    return any != 0;
#endif
}

/* Whole numbers below 2^51 in size as float64 ones: they stand in the low bits of 1.5 * 2^52 + number. */
INLINE wide from_longs(longs value) { return (wide)(value + 0x4338000000000000) - 0x1.8p52; }

/* (value - highest) / temperature, as the reference rounds it. */
INLINE wide scores_of(wide value, double highest, double temperature) { return (value - highest) / temperature; }

/* e to the x, x <= 0, within one unit in the last place; 0 below -700. Series to the 13th power after the reduction of
 * Cody and Waite. */
INLINE wide exponential_wide(wide x) {
    const double magic = 0x1.8p52;
    const wide shifted = x * 0x1.71547652b82fep0 + magic, whole = shifted - magic;
    const wide rest = x - whole * 0x1.62e42fefa3800p-1 - whole * 0x1.ef35793c76730p-45;
    wide series = rest * (1.0 / 6227020800) + 1.0 / 479001600;
    series = series * rest + 1.0 / 39916800;
    series = series * rest + 1.0 / 3628800;
    series = series * rest + 1.0 / 362880;
    series = series * rest + 1.0 / 40320;
    series = series * rest + 1.0 / 5040;
    series = series * rest + 1.0 / 720;
    series = series * rest + 1.0 / 120;
    series = series * rest + 1.0 / 24;
    series = series * rest + 1.0 / 6;
    series = series * rest + 0.5;
    series = series * rest + 1.0;
    series = series * rest + 1.0;
    const words power = ((words)shifted - 0x4338000000000000u + 1023u) << 52;
    return choose_wide(x < -700.0, (wide){0}, series * (wide)power);
}

/* Natural logarithm of normal numbers above 0, within one unit in the last place; the method and the numbers of fdlibm's
 * e_log.c (Sun Microsystems, 1993). */
INLINE wide logarithm(wide x) {
    const words code = (words)x, root_half = all_words(0x3fe6a09e667f3bcdu);
    const longs power = (longs)(code - root_half) >> 52; /* x = 2^power * (1 + f), 1 + f in sqrt(1/2) to sqrt(2) */
    const wide f = (wide)(code - ((words)power << 52)) - 1.0, k = from_longs(power);
    const wide s = f / (2.0 + f), z = s * s, w = z * z;
    const wide even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const wide odd = z * (6.666666666666735130e-01 +
                          w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    const wide half_square = 0.5 * f * f;
    const wide low = s * (half_square + (even + odd)) + k * 1.90821492927058770002e-10;
    return k * 6.93147180369123816490e-01 - ((half_square - low) - f);
}

/* SplitMix64's finaliser. */
INLINE words mixed(words state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    return state ^ (state >> 31);
}

#define GOLDEN 0x9E3779B97F4A7C15u

/* What a row's noise begins from. */
INLINE words noise_key(int64_t seed, int64_t position) {
    const words first = mixed(all_words((uint64_t)seed + GOLDEN));
    return mixed(first + all_words((uint64_t)(position + 1) * GOLDEN));
}

/* Uniform in (0, 1), both ends excluded, of the tokens from `token` on. */
INLINE wide uniform_of(words key, int64_t token) {
    words numbers;
    for (int lane = 0; lane < WIDE; lane++) numbers[lane] = (uint64_t)lane * GOLDEN;
    const words digits = mixed(key + all_words((uint64_t)(token + 1) * GOLDEN) + numbers) >> 12;
    return ((wide)(digits | 0x4330000000000000u) - 0x1p52 + 0.5) * 0x1p-52;
}

#endif
