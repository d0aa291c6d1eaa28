/* logits[row, token] = LOWEST for the tokens whose bit is 1, and whether all logits of a row were finite before.
 *
 * A task is a part of a row. It reads and writes every logit once, as integers: NaN keeps its bits.
 */

#include "../native/numbers.h"

enum { PART = 16384, GROUP = 16 }; /* tokens of a task, and of two bytes of a mask */

/* -1e30, rounded to float32 and to bfloat16. */
static const uint32_t LOWEST_32 = 0xf149f2cau;
static const uint16_t LOWEST_16 = 0xf14au;

/* Mirrored by kernels/token_masks/native.py. */
typedef struct {
    void *logits;             /* [.., vocab] */
    const int64_t *rows;      /* [num_rows] of the logits */
    const uint8_t *forbidden; /* [num_rows, mask_bytes] bit 1: the token is forbidden */
    uint8_t *is_finite;       /* [num_rows, parts] */
    int64_t stride, vocab, dtype, num_rows, mask_bytes;
} Forbidding;

typedef uint16_t group_16 __attribute__((vector_size(2 * GROUP)));
typedef uint32_t group_32 __attribute__((vector_size(4 * GROUP)));

/* Element i has bit i alone. */
static const group_16 BIT_16 = {1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9, 1 << 10,
                                1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
static const group_32 BIT_32 = {1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9, 1 << 10,
                                1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};

INLINE int64_t num_parts(const Forbidding *p) { return (p->vocab + PART - 1) / PART; }

INLINE uint16_t bits_from(const uint8_t *mask, int64_t token) {
    return (uint16_t)(mask[token / 8] | mask[token / 8 + 1] << 8);
}

INLINE int is_forbidden(const uint8_t *mask, int64_t token) { return mask[token / 8] >> token % 8 & 1; }

static int forbid_16(uint16_t *row, const uint8_t *mask, int64_t begin, int64_t end) {
    const uint16_t exponent = 0x7f80;
    const int64_t whole = begin + (end - begin) / GROUP * GROUP;
    group_16 spoiled = {0};
    int is_finite = 1;
    for (int64_t token = begin; token < whole; token += GROUP) {
        group_16 codes;
        memcpy(&codes, row + token, sizeof codes);
        spoiled |= (group_16)((codes & exponent) == exponent);
        const group_16 where = (group_16)((BIT_16 & bits_from(mask, token)) != 0);
        codes = (codes & ~where) | (LOWEST_16 & where);
        memcpy(row + token, &codes, sizeof codes);
    }
    for (int lane = 0; lane < GROUP; lane++) is_finite &= spoiled[lane] == 0;
    for (int64_t token = whole; token < end; token++) {
        is_finite &= (row[token] & exponent) != exponent;
        if (is_forbidden(mask, token)) row[token] = LOWEST_16;
    }
    return is_finite;
}

static int forbid_32(uint32_t *row, const uint8_t *mask, int64_t begin, int64_t end) {
    const uint32_t exponent = 0x7f800000u;
    const int64_t whole = begin + (end - begin) / GROUP * GROUP;
    group_32 spoiled = {0};
    int is_finite = 1;
    for (int64_t token = begin; token < whole; token += GROUP) {
        group_32 codes;
        memcpy(&codes, row + token, sizeof codes);
        spoiled |= (group_32)((codes & exponent) == exponent);
        const group_32 where = (group_32)((BIT_32 & (uint32_t)bits_from(mask, token)) != 0);
        codes = (codes & ~where) | (LOWEST_32 & where);
        memcpy(row + token, &codes, sizeof codes);
    }
    for (int lane = 0; lane < GROUP; lane++) is_finite &= spoiled[lane] == 0;
    for (int64_t token = whole; token < end; token++) {
        is_finite &= (row[token] & exponent) != exponent;
        if (is_forbidden(mask, token)) row[token] = LOWEST_32;
    }
    return is_finite;
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)step, (void)num_threads;
    const Forbidding *p = problem;
    return p->num_rows * num_parts(p);
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)step, (void)num_threads, (void)scratch;
    const Forbidding *p = problem;
    const int64_t place = task / num_parts(p), begin = task % num_parts(p) * PART;
    const int64_t end = begin + PART < p->vocab ? begin + PART : p->vocab;
    const uint8_t *mask = p->forbidden + place * p->mask_bytes;
    char *row = (char *)p->logits + p->rows[place] * p->stride * item_bytes((int)p->dtype);
    p->is_finite[task] = (uint8_t)(p->dtype == BFLOAT16 ? forbid_16((uint16_t *)row, mask, begin, end)
                                                         : forbid_32((uint32_t *)row, mask, begin, end));
}

const OpKind forbid_op = {"forbid", num_tasks, run, NULL};
