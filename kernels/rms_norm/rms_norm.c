/* y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset), a row at a time, with the residual's sum if wanted.
 *
 * A task is a run of rows. A row is read twice: for its squares, and, from the cache, for the result. The sums' order
 * follows from the row's length alone.
 */

#include "../native/numbers.h"

/* Numbers of a task at least: short rows are grouped until claiming a task costs little beside it. */
enum { NUMBERS_OF_TASK = 8192 };

/* Mirrored by kernels/rms_norm/native.py. */
typedef struct {
    const void *x;      /* [num_tokens, hidden]; may be y */
    void *residual;     /* [num_tokens, hidden] that takes residual + x, and is normed in place of x; or NULL */
    const void *weight; /* [hidden] */
    void *y;            /* [num_tokens, hidden] */
    int64_t x_stride, residual_stride, y_stride, hidden;
    int64_t dtype; /* of all of them */
    float eps, weight_offset;
} RmsNorm;

typedef struct {
    vec first, second;
} Two;

INLINE Two load_up_to(const void *row, int64_t place, int64_t count, int dtype) {
    Two value;
    if (count >= PAIR)
        load_pair(row, place, dtype, &value.first, &value.second);
    else
        load_part(row, place, count, dtype, &value.first, &value.second);
    return value;
}

INLINE void store_up_to(void *row, int64_t place, int64_t count, int dtype, Two value) {
    if (count >= PAIR)
        store_pair(row, place, dtype, value.first, value.second);
    else
        store_part(row, place, count, dtype, value.first, value.second);
}

/* Adds the squares of the numbers from `place` on, `count` of them or a pair, to the sums. */
INLINE Two add_squares(const void *x, void *residual, int64_t place, int64_t count, int dtype, Two sums) {
    Two value = load_up_to(x, place, count, dtype);
    if (residual) {
        const Two other = load_up_to(residual, place, count, dtype);
        const Two total = {value.first + other.first, value.second + other.second};
        store_up_to(residual, place, count, dtype, total);
        value = load_up_to(residual, place, count, dtype); /* the sum as it was rounded */
    }
    sums.first += value.first * value.first;
    sums.second += value.second * value.second;
    return sums;
}

INLINE void scale_numbers(const RmsNorm *p, const void *values, void *y, int64_t place, int64_t count, int dtype,
                          vec scale) {
    const Two value = load_up_to(values, place, count, dtype), weight = load_up_to(p->weight, place, count, dtype);
    const Two result = {value.first * scale * (weight.first + p->weight_offset),
                        value.second * scale * (weight.second + p->weight_offset)};
    store_up_to(y, place, count, dtype, result);
}

INLINE void norm_row(const RmsNorm *p, int64_t row, int dtype) {
    const int64_t item = item_bytes(dtype), hidden = p->hidden, whole = hidden / PAIR * PAIR, left = hidden - whole;
    const void *x = (const char *)p->x + row * p->x_stride * item;
    void *residual = p->residual ? (char *)p->residual + row * p->residual_stride * item : NULL;
    void *y = (char *)p->y + row * p->y_stride * item;
    Two sums = {{0}, {0}};
    for (int64_t place = 0; place < whole; place += PAIR) sums = add_squares(x, residual, place, PAIR, dtype, sums);
    if (left) sums = add_squares(x, residual, whole, left, dtype, sums);
    const vec scale = all(1.0f / __builtin_sqrtf(sum_of(sums.first + sums.second) / (float)hidden + p->eps));
    const void *values = residual ? residual : x;
    for (int64_t place = 0; place < whole; place += PAIR) scale_numbers(p, values, y, place, PAIR, dtype, scale);
    if (left) scale_numbers(p, values, y, whole, left, dtype, scale);
}

static int64_t rows_of_task(const RmsNorm *p) { return (NUMBERS_OF_TASK + p->hidden - 1) / p->hidden; }

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    const int64_t rows = rows_of_task(problem);
    return (step->num_tokens + rows - 1) / rows;
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const RmsNorm *p = problem;
    const int64_t rows = rows_of_task(p), begin = task * rows;
    const int64_t end = begin + rows < step->num_tokens ? begin + rows : step->num_tokens;
    for (int64_t row = begin; row < end; row++) {
        if (p->dtype == BFLOAT16)
            norm_row(p, row, BFLOAT16);
        else if (p->dtype == FLOAT16)
            norm_row(p, row, FLOAT16);
        else
            norm_row(p, row, FLOAT32);
    }
}

const OpKind rms_norm_op = {"rms_norm", num_tasks, run, NULL};
