/* y = x @ weight.T + bias for a weight as checkpoints have it, [out, in]: a head that shares it with the embedding.
 *
 * Outputs are taken eight at a time, since their rows of the weight then stay in the nearest cache for all rows of x. A
 * sum has one order, whatever the other rows: lane by lane over the inputs, then over the lanes.
 */

#include <stddef.h>

#include "../native/sums.h"
#include "linear.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { TILE_ROWS = LANES == 16 ? 3 : 1, OUTPUTS = 8, OUTPUTS_OF_TASK = 64 };

/* sums[row][output] += x[row] . weight[output]. `ahead` is fetched meanwhile, where it is no NULL. */
INLINE void dot_rows(const Linear *p, const char *x, const char *weight, int outputs, const char *ahead,
                     vec sums[TILE_ROWS][OUTPUTS], int rows, int dtype) {
    const int64_t item = item_bytes(dtype), in = p->in, x_bytes = p->x_stride * item, row_bytes = in * item;
    int64_t place = 0;
    for (; place + PAIR <= in; place += PAIR) {
        if (ahead)
            for (int output = 0; output < outputs; output++)
                for (int64_t line = 0; line < PAIR * item; line += LINE)
                    __builtin_prefetch(ahead + output * row_bytes + place * item + line);
#ifdef __AVX512BF16__
        if (dtype == BFLOAT16) {
            __m512bh both[TILE_ROWS];
            for (int row = 0; row < rows; row++) both[row] = (__m512bh)_mm512_loadu_si512(x + row * x_bytes + place * item);
            _Pragma("GCC unroll 8") for (int output = 0; output < outputs; output++) {
                const __m512bh weights = (__m512bh)_mm512_loadu_si512(weight + output * row_bytes + place * item);
                for (int row = 0; row < rows; row++)
                    sums[row][output] = (vec)_mm512_dpbf16_ps((__m512)sums[row][output], both[row], weights);
            }
            continue;
        }
#endif
        if (dtype == FLOAT32) { /* half a pair at a time, which takes fewer registers */
            for (int half = 0; half < 2; half++) {
                const int64_t column = place + half * LANES;
                vec some[TILE_ROWS];
                for (int row = 0; row < rows; row++) some[row] = load((const float *)(x + row * x_bytes) + column);
                _Pragma("GCC unroll 8") for (int output = 0; output < outputs; output++) {
                    const vec weights = in_register(load((const float *)(weight + output * row_bytes) + column));
                    for (int row = 0; row < rows; row++) sums[row][output] += some[row] * weights;
                }
            }
            continue;
        }
        vec first[TILE_ROWS], second[TILE_ROWS];
        for (int row = 0; row < rows; row++) load_pair(x + row * x_bytes, place, dtype, &first[row], &second[row]);
        _Pragma("GCC unroll 8") for (int output = 0; output < outputs; output++) {
            vec one, other;
            load_pair(weight + output * row_bytes, place, dtype, &one, &other);
            for (int row = 0; row < rows; row++) {
                sums[row][output] += first[row] * one;
                sums[row][output] += second[row] * other;
            }
        }
    }
    if (place < in)
        for (int row = 0; row < rows; row++) {
            vec first, second;
            load_part(x + row * x_bytes, place, in - place, dtype, &first, &second);
            for (int output = 0; output < outputs; output++) {
                vec one, other;
                load_part(weight + output * row_bytes, place, in - place, dtype, &one, &other);
                sums[row][output] += first * one;
                sums[row][output] += second * other;
            }
        }
}

INLINE void multiply_tile(const Linear *p, int64_t row, int rows, int64_t first_output, int outputs, const char *ahead,
                          int dtype) {
    const int64_t item = item_bytes(dtype);
    vec sums[TILE_ROWS][OUTPUTS];
    for (int idx = 0; idx < rows; idx++)
        for (int output = 0; output < OUTPUTS; output++) sums[idx][output] = (vec){0};
    dot_rows(p, (const char *)p->x + row * p->x_stride * item, (const char *)p->panels + first_output * p->in * item,
             outputs, ahead, sums, rows, dtype);
    for (int idx = 0; idx < rows; idx++) {
        const eight totals = sums_of_eight(sums[idx]);
        char *y = (char *)p->y + (row + idx) * p->y_stride * item;
        for (int output = 0; output < outputs; output++) {
            const float bias = p->bias ? load_one(p->bias, first_output + output, dtype) : 0.0f;
            store_one(y, first_output + output, dtype, totals[output] + bias);
        }
    }
}

INLINE void multiply_rows(const Linear *p, const Step *step, int64_t first_output, int outputs, const char *ahead,
                          int dtype) {
    for (int64_t row = 0; row < step->num_tokens;) {
        const int64_t left = step->num_tokens - row;
        const char *next = row == 0 ? ahead : NULL;
#if defined(__AVX512F__)
        if (left >= 3) {
            multiply_tile(p, row, 3, first_output, outputs, next, dtype);
            row += 3;
            continue;
        }
        if (left == 2) {
            multiply_tile(p, row, 2, first_output, outputs, next, dtype);
            return;
        }
#endif
        (void)left;
        multiply_tile(p, row++, 1, first_output, outputs, next, dtype);
    }
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return step->num_tokens ? (((const Linear *)problem)->out + OUTPUTS_OF_TASK - 1) / OUTPUTS_OF_TASK : 0;
}

INLINE void run_task(const Linear *p, const Step *step, int64_t task, int dtype) {
    const int64_t begin = task * OUTPUTS_OF_TASK, left = p->out - begin;
    const int64_t end = begin + (left < OUTPUTS_OF_TASK ? left : OUTPUTS_OF_TASK);
    int64_t output = begin;
    for (; output + OUTPUTS <= end; output += OUTPUTS) {
        const int is_more = output + 2 * OUTPUTS <= end;
        const char *ahead = (const char *)p->panels + (output + OUTPUTS) * p->in * item_bytes(dtype);
        multiply_rows(p, step, output, OUTPUTS, is_more ? ahead : NULL, dtype);
    }
    for (; output < end; output++) multiply_rows(p, step, output, 1, NULL, dtype);
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)num_threads, (void)scratch;
    const Linear *p = problem;
    if (p->dtype == BFLOAT16)
        run_task(p, step, task, BFLOAT16);
    else if (p->dtype == FLOAT16)
        run_task(p, step, task, FLOAT16);
    else
        run_task(p, step, task, FLOAT32);
}

const OpKind plain_linear_op = {"plain_linear", num_tasks, run, NULL};
