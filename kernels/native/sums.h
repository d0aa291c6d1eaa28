/* Sums over the lanes of several vectors at once, each in one fixed order. */

#ifndef MOTET_SUMS_H
#define MOTET_SUMS_H

#include "numbers.h"

typedef float eight __attribute__((vector_size(32)));
typedef uint32_t eight_bits __attribute__((vector_size(32)));

#ifdef __clang__
#define SHUFFLE8(a, b, i, j, k, l, m, n, o, p) __builtin_shufflevector(a, b, i, j, k, l, m, n, o, p)
#else
#define SHUFFLE8(a, b, i, j, k, l, m, n, o, p) __builtin_shuffle(a, b, (eight_bits){i, j, k, l, m, n, o, p})
#endif

/* The sums over the lanes of eight vectors. */
INLINE eight sums_of_eight(const vec *values) {
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

#endif
