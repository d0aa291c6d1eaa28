/* y = x @ weight.T + bias for weights in panels, from one row of x to thousands.
 *
 * A panel holds PAIR outputs, in the order of a pair, input by input: [in][PAIR], of bfloat16 [in / 2][PAIR][2], which is
 * what the CPU's own bfloat16 product takes. kernels/linear/panels.py makes them. A tile is up to ROWS rows of x by one
 * panel, whose sums stay in registers over all inputs; each output is one sum over the inputs in their order, so that
 * no bit depends on the other rows. While a panel is multiplied, the one behind it is fetched.
 */

#include <stddef.h>

#include "../native/numbers.h"
#include "linear.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

enum { ROWS = LANES == 16 ? 12 : 4, ROW_BLOCK = 16 * ROWS, PANELS_OF_TASK = 4 };

/* Where the panel that is wanted next lies, and how many bytes of it each turn of this tile fetches. */
typedef struct {
    const char *from;
    int64_t step;
} Ahead;

INLINE void fetch(Ahead ahead, int64_t turn) {
    if (!ahead.step) return;
    __builtin_prefetch(ahead.from + turn * ahead.step, 0, 2);
    if (ahead.step > LINE) __builtin_prefetch(ahead.from + turn * ahead.step + LINE, 0, 2);
}

#define EACH_ROW _Pragma("GCC unroll 12") for (int row = 0; row < rows; row++)

INLINE void multiply_tile(const Linear *p, const void *x, const char *panel, int64_t first_output, void *y, int rows,
                          int dtype, Ahead ahead) {
    vec sums[ROWS][2];
    EACH_ROW sums[row][0] = sums[row][1] = (vec){0};
    const int64_t in = p->in, stride = p->x_stride;
    if (dtype == BFLOAT16) {
        const uint16_t *values = x;
        for (int64_t idx = 0; idx < in / 2; idx++) {
            const char *both = panel + idx * PAIR * 4;
            fetch(ahead, idx);
#ifdef __AVX512BF16__
            const __m512bh one = (__m512bh)_mm512_loadu_si512(both), other = (__m512bh)_mm512_loadu_si512(both + 64);
            EACH_ROW {
                int32_t two;
                memcpy(&two, values + row * stride + 2 * idx, sizeof two);
                const __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
                sums[row][0] = (vec)_mm512_dpbf16_ps((__m512)sums[row][0], factor, one);
                sums[row][1] = (vec)_mm512_dpbf16_ps((__m512)sums[row][1], factor, other);
            }
#else
            bits one, other;
            memcpy(&one, both, sizeof one);
            memcpy(&other, both + sizeof one, sizeof other);
            EACH_ROW {
                uint32_t two;
                memcpy(&two, values + row * stride + 2 * idx, sizeof two);
                const bits factor = two - (bits){0};
                sums[row][0] += (vec)(factor << 16) * (vec)(one << 16);
                sums[row][1] += (vec)(factor << 16) * (vec)(other << 16);
                sums[row][0] += (vec)(factor & 0xffff0000u) * (vec)(one & 0xffff0000u);
                sums[row][1] += (vec)(factor & 0xffff0000u) * (vec)(other & 0xffff0000u);
            }
#endif
        }
        if (in % 2) {
            bits one, other;
            memcpy(&one, panel + in / 2 * PAIR * 4, sizeof one);
            memcpy(&other, panel + in / 2 * PAIR * 4 + sizeof one, sizeof other);
            EACH_ROW {
                const float factor = load_one(values + row * stride, in - 1, BFLOAT16);
                sums[row][0] += factor * (vec)(one << 16);
                sums[row][1] += factor * (vec)(other << 16);
            }
        }
    } else {
        for (int64_t idx = 0; idx < in; idx++) {
            fetch(ahead, idx);
            vec one, other;
            load_pair(panel, idx * PAIR, dtype, &one, &other);
            EACH_ROW {
                const float factor = load_one((const char *)x + row * stride * item_bytes(dtype), idx, dtype);
                sums[row][0] += factor * one;
                sums[row][1] += factor * other;
            }
        }
    }
    const int64_t count = p->out - first_output;
    if (p->bias) {
        vec one, other;
        if (count >= PAIR)
            load_pair(p->bias, first_output, dtype, &one, &other);
        else
            load_part(p->bias, first_output, count, dtype, &one, &other);
        EACH_ROW {
            sums[row][0] += one;
            sums[row][1] += other;
        }
    }
    EACH_ROW {
        const int64_t place = row * p->y_stride + first_output;
        if (count >= PAIR)
            store_pair(y, place, dtype, sums[row][0], sums[row][1]);
        else
            store_part(y, place, count, dtype, sums[row][0], sums[row][1]);
    }
}

#define TILE(count) \
    case count: multiply_tile(p, x, panel, first_output, y, count, dtype, ahead); return;

/* Every number of rows is a loop of its own, so that its sums are registers. */
INLINE void multiply_rows(const Linear *p, const void *x, const char *panel, int64_t first_output, void *y, int64_t rows,
                          int dtype, Ahead ahead) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if defined(__AVX512F__)
        TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

static __attribute__((noinline)) void multiply_bfloat16(const Linear *p, const void *x, const char *panel,
                                                        int64_t first_output, void *y, int64_t rows, Ahead ahead) {
    multiply_rows(p, x, panel, first_output, y, rows, BFLOAT16, ahead);
}

static __attribute__((noinline)) void multiply_float16(const Linear *p, const void *x, const char *panel,
                                                       int64_t first_output, void *y, int64_t rows, Ahead ahead) {
    multiply_rows(p, x, panel, first_output, y, rows, FLOAT16, ahead);
}

static __attribute__((noinline)) void multiply_float32(const Linear *p, const void *x, const char *panel,
                                                       int64_t first_output, void *y, int64_t rows, Ahead ahead) {
    multiply_rows(p, x, panel, first_output, y, rows, FLOAT32, ahead);
}

static int64_t num_row_blocks(const Step *step) { return (step->num_tokens + ROW_BLOCK - 1) / ROW_BLOCK; }

static int64_t num_panel_groups(const Linear *p) {
    const int64_t panels = (p->out + PAIR - 1) / PAIR;
    return (panels + PANELS_OF_TASK - 1) / PANELS_OF_TASK;
}

static int64_t num_tasks(const void *problem, const Step *step, int64_t num_threads) {
    (void)num_threads;
    return num_row_blocks(step) * num_panel_groups(problem);
}

/* The panel that this thread is likely to multiply after `panel`, the last of the task where `is_last`: while threads are
 * equally fast, each takes every num_threads-th task. Below 0: none. */
static int64_t panel_after(const Linear *p, const Step *step, int64_t panel, int is_last, int64_t task,
                           int64_t num_threads) {
    const int64_t groups = num_panel_groups(p), panels = (p->out + PAIR - 1) / PAIR;
    if (!is_last) return panel + 1 < panels ? panel + 1 : -1;
    if (task + num_threads >= num_row_blocks(step) * groups) return -1;
    return (task + num_threads) % groups * PANELS_OF_TASK;
}

static void run(const void *problem, const Step *step, int64_t task, int64_t num_threads, void *scratch) {
    (void)scratch;
    const Linear *p = problem;
    const int64_t groups = num_panel_groups(p), panels = (p->out + PAIR - 1) / PAIR;
    const int64_t first = task % groups * PANELS_OF_TASK, begin = task / groups * ROW_BLOCK;
    const int64_t last = first + PANELS_OF_TASK < panels ? first + PANELS_OF_TASK : panels;
    const int64_t end = begin + ROW_BLOCK < step->num_tokens ? begin + ROW_BLOCK : step->num_tokens;
    const int64_t item = item_bytes((int)p->dtype), num_tiles = (end - begin + ROWS - 1) / ROWS;
    const int64_t inputs = p->dtype == BFLOAT16 ? (p->in + 1) / 2 * 2 : p->in;
    const int64_t panel_bytes = inputs * PAIR * item, turns = p->dtype == BFLOAT16 ? p->in / 2 : p->in;
    for (int64_t panel = first; panel < last; panel++) {
        const char *values = (const char *)p->panels + panel * panel_bytes;
        /* The tiles share the fetching of the next panel. */
        const int64_t next = panel_after(p, step, panel, panel + 1 == last, task, num_threads);
        Ahead ahead = {(const char *)p->panels + next * panel_bytes, 0};
        if (next >= 0 && turns) ahead.step = panel_bytes / num_tiles / turns;
        for (int64_t row = begin, tile = 0; row < end; tile++) {
            const int64_t rows = (end - row + num_tiles - tile - 1) / (num_tiles - tile);
            const void *x = (const char *)p->x + row * p->x_stride * item;
            void *y = (char *)p->y + row * p->y_stride * item;
            if (p->dtype == BFLOAT16)
                multiply_bfloat16(p, x, values, panel * PAIR, y, rows, ahead);
            else if (p->dtype == FLOAT16)
                multiply_float16(p, x, values, panel * PAIR, y, rows, ahead);
            else
                multiply_float32(p, x, values, panel * PAIR, y, rows, ahead);
            ahead.from += ahead.step * turns;
            row += rows;
        }
    }
}

const OpKind linear_op = {"linear", num_tasks, run, NULL};
