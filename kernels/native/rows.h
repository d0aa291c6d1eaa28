/* Rows of any element type as float32 numbers in their order, in scratch space.
 *
 * Passes over rows that do not look across numbers load pairs instead (numbers.h), which costs less.
 */

#ifndef MOTET_ROWS_H
#define MOTET_ROWS_H

#include "numbers.h"

/* Floats of a row of `count` in scratch space: loops over vectors may pass its end by less than a vector. */
INLINE int64_t padded(int64_t count) { return (count + 2 * LANES - 1) / LANES * LANES; }

/* LANES numbers in their order. */
INLINE vec load_lanes(const void *row, int64_t place, int dtype) {
    if (dtype == BFLOAT16) {
        shorts codes;
        memcpy(&codes, (const uint16_t *)row + place, sizeof codes);
        return (vec)(__builtin_convertvector(codes, bits) << 16);
    }
    if (dtype == FLOAT16) {
        halves value;
        memcpy(&value, (const uint16_t *)row + place, sizeof value);
        return widened(value);
    }
    return load((const float *)row + place);
}

INLINE void store_lanes(void *row, int64_t place, int dtype, vec value) {
    if (dtype == BFLOAT16) {
        const shorts codes = bfloat16_codes(value);
        memcpy((uint16_t *)row + place, &codes, sizeof codes);
    } else if (dtype == FLOAT16) {
        const halves half = narrowed(value);
        memcpy((uint16_t *)row + place, &half, sizeof half);
    } else {
        store((float *)row + place, value);
    }
}

/* `count` numbers as float32, with zeros up to the end of the last vector. `to` is as long as padded(count). */
INLINE void widen(const void *from, int64_t count, int dtype, float *to) {
    const int64_t whole = count / LANES * LANES;
    for (int64_t place = 0; place < whole; place += LANES) store(to + place, load_lanes(from, place, dtype));
    store(to + whole, (vec){0});
    for (int64_t place = whole; place < count; place++) to[place] = load_one(from, place, dtype);
}

INLINE void narrow(const float *from, int64_t count, int dtype, void *to) {
    const int64_t whole = count / LANES * LANES;
    for (int64_t place = 0; place < whole; place += LANES) store_lanes(to, place, dtype, load(from + place));
    for (int64_t place = whole; place < count; place++) store_one(to, place, dtype, from[place]);
}

#endif
